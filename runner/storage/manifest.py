"""What a checkpoint holds, with the SHA-256 of every file and of itself: only what is as written is deserialised."""

from __future__ import annotations

import errno
import hashlib
import json
from pathlib import Path
from typing import Any

from runner.config.errors import ConfigError

NAME = "manifest.json"
SCHEMA = 2

_DAMAGE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO)
"""What reading a damaged checkpoint gives; other errors (no permission, no memory) are no fault of its own."""


class DamagedError(Exception):
    """A checkpoint is not what was written: which file, and how."""


def manifest_of(directory: Path, **facts: Any) -> str:
    """The text of a manifest: `facts`, and the hash of every file in `directory`."""
    files = {path.name: _sha256(path) for path in sorted(directory.iterdir())}
    manifest = {"schema": SCHEMA, **facts, "files": files}
    return json.dumps(manifest | {"sha256": _seal(manifest)}, indent=2) + "\n"


def verified_manifest(directory: Path) -> dict[str, Any]:
    """The manifest in `directory`, after a look at every byte of what it names.

    Raises:
        DamagedError: when a file is missing or its hash differs.
        ConfigError: when another version of this project wrote it.
        OSError: when it cannot be read for another reason.
    """
    try:
        manifest = _read(directory / NAME)
        if manifest.get("schema") != SCHEMA:
            why = f"it has schema {manifest.get('schema')}, this version reads {SCHEMA}"
            raise ConfigError("resume", str(directory), why, "resume with the version that wrote it")
        for name, sha256 in manifest["files"].items():
            if _sha256(directory / name) != sha256:
                raise DamagedError(f"{directory / name} is damaged: its SHA-256 is not the manifest's")
    except OSError as error:
        if error.errno not in _DAMAGE:
            raise
        raise DamagedError(f"{directory} is damaged: {error.filename}: {error.strerror}") from None
    return manifest


def _read(path: Path) -> dict[str, Any]:
    """What the manifest says, if it is as it was written: its own SHA-256 is found in the same way in every schema."""
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        seal = manifest.pop("sha256")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedError(f"{path} is damaged: {error!r}") from None
    if seal != _seal(manifest):
        raise DamagedError(f"{path} is damaged: its SHA-256 is another")
    return manifest


def _seal(manifest: dict[str, Any]) -> str:
    """The SHA-256 of what a manifest says."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
