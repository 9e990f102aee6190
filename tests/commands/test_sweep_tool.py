"""Tests of `runner sweep`, and of sweeps that run in the background."""

from __future__ import annotations

import fcntl
import json
import os
import shlex
from pathlib import Path
from typing import Any

import pytest
from helpers.command import names_left_in, run_command, run_in_new_interpreter, wait_until
from helpers.compose import TINY_CPU
from helpers.permissions import enforced_permissions

from runner.analysis.saved_runs import is_locked
from runner.commands.sweep import lines, main
from runner.storage.ledger_file import read_ledger
from runner.sweep.unfinished_commands import remember_command


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """The directory of a sweep that was stopped: a job is done, one has crashed, one was running."""
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
    ledger = {"typed": [], "command": ["seed=0,1,2"], "complete": False, "pid": 7, "jobs": jobs}
    (path / "sweep.json").write_text(json.dumps(ledger | changes))


def test_the_state_of_the_sweep_and_of_its_jobs_is_shown(sweep: Path) -> None:
    assert lines(sweep, read_ledger(sweep)) == [
        f"{sweep}: stopped; --resume goes on",
        "1 crashed, 1 done, 1 running",
        "  001-seed=1: crashed: why",
        "  002-seed=2 (core 1): step 6 \\x1b[31m",
    ]
    write(sweep, complete=True, jobs={})
    assert lines(sweep, read_ledger(sweep)) == [f"{sweep}: complete", "no job has begun"]
    with (sweep / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert lines(sweep, read_ledger(sweep))[0] == f"{sweep}: running, process 7"


def test_control_characters_in_the_directory_of_a_job_are_not_printed(sweep: Path) -> None:
    write(sweep, jobs={"1": {"config_hash": "a", "state": "crashed", "directory": "a\nb\x1b[0m", "error": ""}})
    assert lines(sweep, read_ledger(sweep))[2:] == ["  a b\\x1b[0m: crashed"]


def test_follow_returns_when_the_sweep_has_ended(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(sweep), "--follow"]) == 1, "a job has crashed"
    assert "000-seed=0: done\n001-seed=1: crashed\n002-seed=2: running\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("state", "is_search", "code"),
    [("done", False, 0), ("stopped", False, 0), ("refused", False, 1), ("diverged", False, 1), ("diverged", True, 0)],
)
def test_follow_returns_1_if_a_job_has_failed(state: str, is_search: bool, code: int, sweep: Path) -> None:
    write(sweep, jobs={"0": {"config_hash": "a", "state": state, "directory": "000-seed=0"}})
    if is_search:
        (sweep / "study.log").touch()
    assert main([str(sweep), "--follow"]) == code


@pytest.mark.parametrize("flag", ["--cancel", "--kill"])
def test_canceling_a_sweep_that_has_just_ended_is_not_an_error(
    flag: str, sweep: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(sweep, pid=1234567)
    locked = iter([True])

    def kill(pid: int, number: int) -> None:
        raise ProcessLookupError

    monkeypatch.setattr("runner.commands.sweep.is_locked", lambda path: next(locked, False))
    monkeypatch.setattr("runner.commands.sweep.is_open_in", lambda pid, path: True)
    monkeypatch.setattr("os.kill", kill)
    assert main([str(sweep), flag]) == 0
    assert "stopped; --resume goes on" in capsys.readouterr().out


def test_cancel_is_refused_on_a_system_without_proc(
    sweep: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("runner.commands.sweep.is_locked", lambda path: True)
    monkeypatch.setattr("os.path.isdir", lambda path: False)
    assert main([str(sweep), "--cancel"]) == 2
    assert "this system has no /proc" in capsys.readouterr().err


def test_resuming_types_the_command_again(
    sweep: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[list[str]] = []

    class Ended:
        returncode = 3

    monkeypatch.setattr("subprocess.run", lambda words, **_: seen.append(words) or Ended())
    write(sweep, command=["seed=0,1", "sweep.setup=[touch /tmp/x]"])
    remember_command(sweep, ["seed=0,1", "output_root=/elsewhere", "resume=never", "sweep.slots=2"])
    assert main([str(sweep), "--resume"]) == 3
    typed = ["-m", "seed=0,1", "sweep.slots=2", f"output_root='{sweep.parents[2]}'", "resume=auto"]
    assert seen[0][1:] == ["-m", "runner", *typed]
    assert shlex.split(capsys.readouterr().out) == ["python", "-m", "runner", *typed]


@pytest.mark.parametrize(
    ("arguments", "changes", "words"),
    [
        (["--resume"], {"complete": True}, "the sweep is complete"),
        (["--resume"], {}, "you have not started this sweep in this place"),
        (["--cancel"], {}, "no process runs this sweep"),
        (["--kill"], {}, "no process runs this sweep"),
        (["--folow"], {}, "there is no such flag"),
    ],
)
def test_invalid_requests_are_refused(
    arguments: list[str], changes: dict, words: str, sweep: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(sweep, **changes)
    assert main([str(sweep), *arguments]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["--follow"], ["--cancel"], ["--resume"]])
def test_a_directory_that_cannot_be_read_is_refused(
    arguments: list[str], sweep: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with enforced_permissions(sweep, 0):
        assert main([str(sweep), *arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith("PATH: got ")
    assert "(Permission denied)" in said


def test_a_command_with_a_redacted_secret_is_not_resumed(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    remember_command(sweep, ["data.root=***"])
    assert main([str(sweep), "--resume"]) == 2
    assert "because of a secret" in capsys.readouterr().err


def test_a_process_that_does_not_run_the_sweep_is_not_stopped(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The process ID in the ledger is not trusted, because another user may have written it."""
    write(sweep, pid=os.getpid())
    holder, stay = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        with (sweep / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            os.write(holder[1], b"x")
            os.read(stay[0], 1)
        os._exit(0)
    os.read(holder[0], 1)
    try:
        assert main([str(sweep), "--cancel"]) == 2, "this process, which the ledger names, has not opened the lock"
        assert "cannot be found here" in capsys.readouterr().err
    finally:
        os.write(stay[1], b"x")
        os.waitpid(pid, 0)


def test_a_background_sweep_is_started_and_canceled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command that starts the sweep returns at once."""
    words = (*TINY_CPU, "-m", "seed=0,1", "steps=100000", "save_every=5", "eval_every=0", "sweep.detach=true")
    typed = run_in_new_interpreter(*words, cwd=tmp_path)
    assert typed.returncode == 0, typed.stderr
    assert "the sweep runs in the background" in typed.stdout
    [path] = tmp_path.glob("outputs/sweeps/*/*")
    wait_until(lambda: len(list(path.glob("*/checkpoints/step_*"))) >= 2)
    assert is_locked(path)
    assert main([str(path), "--cancel"]) == 0
    assert not is_locked(path)
    states = {entry["state"] for entry in read_ledger(path)["jobs"].values()}
    assert states == {"stopped"}
    assert "2 stopped" in capsys.readouterr().out
    printed = (path / "console" / "sweep.txt").read_text()
    assert "2 running jobs save and stop" in printed
    assert "Traceback" not in printed


def test_an_invalid_background_sweep_is_refused_before_the_command_returns(tmp_path: Path) -> None:
    code, output = run_command(*TINY_CPU, "-m", "seed=0,1", "optimizer.lr=-1", "sweep.detach=true", cwd=tmp_path)
    assert code == 2
    assert "optimizer.lr: got -1" in output
    assert names_left_in(tmp_path) == set()


@pytest.mark.parametrize("descriptor", ["x", "99"])
def test_the_internal_flag_detached_is_refused_if_a_user_types_it(descriptor: str, tmp_path: Path) -> None:
    code, output = run_command(*TINY_CPU, "-m", "seed=0,1", f"--detached={descriptor}", cwd=tmp_path)
    assert code == 2
    assert "--detached" in output
