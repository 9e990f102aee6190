"""Tests of `runner sweep`, which shows a sweep."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path
from typing import Any

import pytest
from helpers.permissions import enforced_permissions

from runner.commands.sweep import lines, main
from runner.storage.ledger_file import read_ledger


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """The directory of a sweep that was killed: a job is done, one has crashed, one was running."""
    path = tmp_path / "outputs" / "sweeps" / "a" / "now"
    (path / "console").mkdir(parents=True)
    (path / "console" / "002.txt").write_text("step 5\nstep 6 \x1b[31m\n")
    write(path)
    return path


def write(path: Path, **changes: Any) -> None:
    jobs = {
        "0": {"config_hash": "a", "state": "done", "code": 0, "directory": "000-seed=0"},
        "1": {"config_hash": "a", "state": "crashed", "code": 1, "directory": "001-seed=1", "error": "why\n  remedy"},
        "2": {"config_hash": "a", "state": "running", "slot": "core 1", "directory": "002-seed=2"},
    }
    ledger = {"typed": [], "complete": False, "pid": 7, "jobs": jobs}
    (path / "sweep.json").write_text(json.dumps(ledger | changes))


def test_the_state_of_the_sweep_and_of_its_jobs_is_shown(sweep: Path) -> None:
    assert lines(sweep, read_ledger(sweep)) == [
        f"{sweep}: stopped; its command with resume=auto goes on",
        "1 crashed, 1 done, 1 killed",
        "  001-seed=1: crashed: why",
        "  002-seed=2 (core 1): step 6 \\x1b[31m",
    ]
    (sweep / "002-seed=2").mkdir()
    (sweep / "002-seed=2" / "result.json").write_text('{"status": "done", "steps": 6}')
    assert lines(sweep, read_ledger(sweep))[1:] == ["1 crashed, 2 done", "  001-seed=1: crashed: why"]
    write(sweep, complete=True, jobs={})
    assert lines(sweep, read_ledger(sweep)) == [f"{sweep}: complete", "no job has begun"]
    with (sweep / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert lines(sweep, read_ledger(sweep))[0] == f"{sweep}: running, process 7"


def test_control_characters_in_the_directory_of_a_job_are_not_printed(sweep: Path) -> None:
    write(sweep, jobs={"1": {"config_hash": "a", "state": "crashed", "directory": "a\nb\x1b[0m", "error": ""}})
    assert lines(sweep, read_ledger(sweep))[2:] == ["  a b\\x1b[0m: crashed"]


def test_a_directory_that_cannot_be_read_is_refused(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with enforced_permissions(sweep, 0):
        assert main([str(sweep)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("PATH: got ")
    assert "(Permission denied)" in said


def test_an_unknown_option_is_refused(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(sweep), "--follow"]) == 2
    assert "--follow: there is no such" in capsys.readouterr().err
