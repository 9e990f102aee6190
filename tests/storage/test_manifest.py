"""Tests of `runner.storage.manifest`: the hashes of all files and of the manifest itself are verified."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from runner.config.errors import ConfigError
from runner.storage.manifest import NAME, SCHEMA, DamagedError, manifest_of, verified_manifest


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A directory with two files and their manifest."""
    (tmp_path / "a.bin").write_bytes(bytes(range(256)))
    (tmp_path / "empty").touch()
    (tmp_path / NAME).write_text(manifest_of(tmp_path, step=7, world_size=2))
    return tmp_path


def update_hashes(directory: Path, **changes: Any) -> None:
    """Change the manifest, and update its own hash."""
    manifest = json.loads((directory / NAME).read_text()) | changes
    manifest.pop("sha256")
    seal = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    (directory / NAME).write_text(json.dumps(manifest | {"sha256": seal}))


def test_a_manifest_contains_the_given_values_and_the_hash_of_every_file(directory: Path) -> None:
    manifest = verified_manifest(directory)
    assert manifest == {
        "schema": SCHEMA,
        "step": 7,
        "world_size": 2,
        "files": {
            "a.bin": hashlib.sha256(bytes(range(256))).hexdigest(),
            "empty": hashlib.sha256(b"").hexdigest(),
        },
    }


@pytest.mark.parametrize("change", ["flipped", "longer", "shorter", "missing", "directory"])
def test_a_changed_file_is_damage(directory: Path, change: str) -> None:
    path = directory / "a.bin"
    data = path.read_bytes()
    path.unlink()
    if change == "directory":
        path.mkdir()
    elif change != "missing":
        path.write_bytes({"flipped": b"\x01" + data[1:], "longer": data + b"x", "shorter": data[:-1]}[change])
    with pytest.raises(DamagedError, match=r"a\.bin"):
        verified_manifest(directory)


def test_a_manifest_that_is_changed_or_missing_is_damage(directory: Path) -> None:
    path = directory / NAME
    path.write_text(path.read_text().replace('"step": 7', '"step": 8'))
    with pytest.raises(DamagedError, match=NAME):
        verified_manifest(directory)
    path.unlink()
    with pytest.raises(DamagedError, match=NAME):
        verified_manifest(directory)


def test_a_changed_manifest_with_a_correct_hash_is_accepted(directory: Path) -> None:
    update_hashes(directory, step=8)
    assert verified_manifest(directory)["step"] == 8


@pytest.mark.parametrize("schema", [SCHEMA - 1, SCHEMA + 1])
def test_another_schema_is_refused_by_key(directory: Path, schema: int) -> None:
    update_hashes(directory, schema=schema)
    with pytest.raises(ConfigError) as refusal:
        verified_manifest(directory)
    assert (refusal.value.key, refusal.value.got) == ("resume", str(directory))
    assert f"schema {schema}" in refusal.value.why


def test_a_file_without_read_permission_is_not_damage(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(path: Path, *_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(os, "open", denied)
    with pytest.raises(PermissionError):
        verified_manifest(directory)


def test_files_that_are_not_in_the_manifest_are_ignored(directory: Path) -> None:
    (directory / "more").write_text("later")
    assert set(verified_manifest(directory)["files"]) == {"a.bin", "empty"}
