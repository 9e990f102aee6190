"""Tests of durable writing in `runner.storage.files`: after a power loss, a file has its old or its new content."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runner.storage import files


def test_the_order_is_write_sync_rename_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, str]] = []

    def recorded(name: str, real: Callable[..., Any], shown: Callable[..., str]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            calls.append((name, shown(*arguments)))
            return real(*arguments)

        return call

    def path_of(descriptor: int) -> str:
        return os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))

    monkeypatch.setattr(os, "fsync", recorded("fsync", os.fsync, path_of))
    monkeypatch.setattr(os, "replace", recorded("replace", os.replace, lambda a, b: f"{a.name} -> {b.name}"))
    files.write_text(tmp_path / "a.yaml", "1")
    assert calls == [("fsync", ".a.yaml.part"), ("replace", ".a.yaml.part -> a.yaml"), ("fsync", tmp_path.name)]
    assert (tmp_path / "a.yaml").read_text() == "1"


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failure_leaves_the_old_content(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    files.write_json(path, {"grüße": 1})

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OSError, match="No space"):
        files.write_json(path, {"grüße": 2})
    monkeypatch.undo()
    assert json.loads(path.read_text(encoding="utf-8")) == {"grüße": 1}
    files.write_json(path, {"grüße": 3})
    assert json.loads(path.read_text(encoding="utf-8")) == {"grüße": 3}
    assert [found.name for found in tmp_path.iterdir()] == ["a.json"]


def test_a_link_in_the_place_of_the_temporary_file_is_not_followed(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("mine")
    (tmp_path / ".a.part").symlink_to(other)
    files.write_text(tmp_path / "a", "theirs")
    assert (other.read_text(), (tmp_path / "a").read_text()) == ("mine", "theirs")
    assert not (tmp_path / "a").is_symlink()
