"""Tests of the cache of the user's sweep commands. The cache keeps a command until its sweep is complete or removed."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.sweep.ledger import Ledger
from runner.sweep.unfinished_commands import forget_command, remember_command, remembered_command


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_command_is_stored_by_the_real_path_of_the_sweep(tmp_path: Path) -> None:
    words = ["seed=0,1", "name='é\udcff'"]
    remember_command(tmp_path / "a", words)
    (tmp_path / "link").symlink_to("a")
    assert remembered_command(tmp_path / "a") == remembered_command(tmp_path / "link") == words
    assert remembered_command(tmp_path / "b") == []
    forget_command(tmp_path / "a")
    assert remembered_command(tmp_path / "a") == []


def test_errors_of_the_cache_directory_are_ignored(tmp_path: Path, cache: Path) -> None:
    cache.write_text("a file")
    remember_command(tmp_path, ["seed=0,1"])
    forget_command(tmp_path)
    assert remembered_command(tmp_path) == []


def test_a_command_is_kept_until_its_sweep_is_complete(tmp_path: Path, cache: Path) -> None:
    with Ledger(["seed=0,1"], tmp_path / "sweeps" / "a", "never", ["seed=0,1", "sweep.slots=2"]) as ledger:
        assert remembered_command(ledger.path) == ["seed=0,1", "sweep.slots=2"]
        ledger.update(0, config_hash="a", state="done", code=0)
        (ledger.path / "000").mkdir()
        ledger.end(complete=False)
    assert remembered_command(ledger.path) == ["seed=0,1", "sweep.slots=2"]
    with Ledger(["seed=0,1"], tmp_path / "sweeps" / "a", "auto") as again:
        assert again.path == ledger.path
        again.end(complete=True)
    assert list((cache / "runner" / "sweeps").iterdir()) == []


def test_no_command_is_kept_of_a_sweep_in_which_no_job_ran(tmp_path: Path, cache: Path) -> None:
    with Ledger(["seed=0,1"], tmp_path / "sweeps" / "a", "never"):
        pass
    assert list((cache / "runner" / "sweeps").iterdir()) == []
