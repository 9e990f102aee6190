"""Kill runs at random moments, and resume them until they are done."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path

from helpers.command import Command, run_command
from helpers.runs import assert_bitwise_equal, only_run, run_outcome

RESULTS = ("status", "steps", "metrics", "best", "config_hash")


def train_with_kills(cwd: Path, arguments: list[str], kills: int, seconds: float, kind: str) -> int:
    """Run the command to its end, killing it up to `kills` times and resuming it; return the number of kills.

    Args:
        seconds: the longest time from the first event of a session to its kill.
        kind: the kind of the command server.
    """
    killed = 0
    while True:
        runs = [path.parent for path in cwd.glob("outputs/*/*/config.yaml")]
        sessions = len(list(cwd.glob("outputs/*/*/events*")))
        command = Command(cwd, *([f"resume={runs[0]}"] if runs else arguments), kind=kind)
        # Most kills hit the training loop, and some the start, when the directory is created and the config written.
        early = time.monotonic() + random.choice([0.3, 60, 60, 60, 60])
        while command.command_exit_code is None and len(list(cwd.glob("outputs/*/*/events*"))) == sessions:
            if time.monotonic() > early:
                break
            time.sleep(0.002)
        time.sleep(random.uniform(0, seconds))
        if command.command_exit_code is None and killed < kills:
            command.signal_processes(signal.SIGKILL)
        code, console = command.wait()
        if code == 0:
            return killed
        assert code == -signal.SIGKILL, console
        killed += 1


def assert_resume_after_kills_is_exact(tmp_path: Path, arguments: list[str], kills: int, kind: str = "ranks") -> None:
    """Kill and resume runs of the command with `arguments`, until there have been `kills` kills over all runs.

    Fail unless each of these runs ends with the same results as a run that is not killed.
    """
    code, console = run_command(*arguments, cwd=tmp_path / "whole", kind=kind)
    assert code == 0, console
    result = json.loads((only_run(tmp_path / "whole") / "result.json").read_text())
    wanted = run_outcome(only_run(tmp_path / "whole"))
    left, number, seconds = kills, 0, result["seconds"]
    while left:
        number += 1
        cwd = tmp_path / f"killed_{number}"
        left -= train_with_kills(cwd, arguments, left, seconds / 2, kind)
        [path] = [directory.parent for directory in cwd.glob("outputs/*/*/config.yaml")]
        assert_bitwise_equal(run_outcome(path), wanted)
        for unbegun in set(cwd.glob("outputs/*/*")) - {path}:  # killed before the config was written
            names = [name for name in os.listdir(unbegun) if not name.endswith(".part")]
            assert set(names) <= {"overrides.yaml", ".lock"}
        again = json.loads((path / "result.json").read_text())
        seconds = min(seconds, again["seconds"] or seconds)  # the machine may be faster than it was before
        assert {key: again[key] for key in RESULTS} == {key: result[key] for key in RESULTS}
        assert not list(path.glob("checkpoints/*.corrupt*"))
        assert not list(path.glob("checkpoints/tmp.*"))
