"""Tests of `runner sweep`, which shows a sweep."""

import fcntl
import json
from typing import Any

from helpers.permissions import enforced_permissions

from runner.commands import sweep

JOBS = {
    "0": {"config_hash": "a", "state": "done", "code": 0, "directory": "000-seed=0"},
    "1": {"config_hash": "a", "state": "crashed", "directory": "001\n\x1b[0m-seed=1", "error": "why\n  remedy"},
    "2": {"config_hash": "a", "state": "running", "slot": "core 1", "directory": "002-seed=2"},
}
"""The jobs of a sweep that was killed."""


def test_the_state_of_the_sweep_and_of_its_jobs_is_shown(tmp_path, capsys):
    def shown(complete: bool = False, jobs: dict[str, Any] = JOBS) -> list[str]:
        ledger = {"typed": [], "complete": complete, "pid": 7, "jobs": jobs}
        (tmp_path / "sweep.json").write_text(json.dumps(ledger))
        assert sweep.main([str(tmp_path)]) == 0
        return capsys.readouterr().out.splitlines()

    (tmp_path / "console").mkdir()
    (tmp_path / "console" / "002.txt").write_text("step 5\nstep 6 \x1b[31m\n")
    crashed = "  001 \\x1b[0m-seed=1: crashed: why"
    assert shown() == [
        f"{tmp_path}: stopped; its command with resume=auto goes on",
        "1 crashed, 1 done, 1 killed",
        crashed,
        "  002-seed=2 (core 1): step 6 \\x1b[31m",
    ]
    (tmp_path / "002-seed=2").mkdir()
    (tmp_path / "002-seed=2" / "result.json").write_text('{"status": "done", "steps": 6}')
    assert shown()[1:] == ["1 crashed, 2 done", crashed]
    refused = {number: JOBS["0"] | {"state": state} for number, state in (("0", "done"), ("1", "refused"))}
    assert shown(jobs=refused)[0] == f"{tmp_path}: complete", "a refused job is refused again"
    assert shown(complete=True, jobs={}) == [f"{tmp_path}: complete", "no job has begun"]
    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert shown()[0] == f"{tmp_path}: running, process 7"
    with enforced_permissions(tmp_path, 0):
        assert sweep.main([str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("PATH: got ")
    assert "(Permission denied)" in said
