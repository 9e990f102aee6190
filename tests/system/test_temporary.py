"""Tests of `remove_abandoned`: it removes only temporary directories of processes that have ended."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from runner.system.temporary import claim_directory, remove_abandoned


@pytest.fixture(autouse=True)
def _own_temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def claim(path: Path) -> Path:
    """Create the directory `path`, let a process claim it and be killed, and return `path`."""
    path.mkdir()
    words = "import os, sys; from runner.system.temporary import claim_directory as c; c(sys.argv[1]); os.kill(0, 9)"
    subprocess.run([sys.executable, "-c", words, str(path)], start_new_session=True, check=False)
    return path


def test_the_directory_of_a_killed_process_is_removed(tmp_path: Path) -> None:
    left = claim(tmp_path / "pymp-left")
    (left / "listener").touch()
    assert (left / "runner.lock").exists()
    remove_abandoned("pymp-")
    assert not left.exists()


def test_links_and_directories_that_are_in_use_unlocked_or_named_otherwise_stay(tmp_path: Path) -> None:
    own, unlocked, other = tmp_path / "pymp-own", tmp_path / "pymp-unlocked", claim(tmp_path / "other")
    own.mkdir()
    unlocked.mkdir()
    (tmp_path / "pymp-link").symlink_to(other)
    assert claim_directory(str(own))
    assert not claim_directory(str(own)), "already"
    remove_abandoned("pymp-")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "pymp-link", "pymp-own", "pymp-unlocked"]
