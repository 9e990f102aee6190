"""The states of runs and sweeps: how they ended, and whether a process is writing to them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from runner.storage import regular_file
from runner.storage.regular_file import UnsafeFileError, check_no_link
from runner.storage.run_directory import RESULT, newest_step

ENDED = ("done", "crashed", "diverged", "stopped")
"""The states that a run records in its `result.json`."""

STATES = (*ENDED, "running", "killed", "damaged")
"""All states of a run. A killed run has no result. A damaged run has a result that cannot be read or, in comparisons, a
config that cannot be read or a number that is not valid."""


def is_locked(directory: Path) -> bool:
    """Return whether a process holds the lock of the run or the sweep in `directory`.

    A process holds the lock as long as it writes to the run or the sweep.
    """
    return regular_file.is_locked(directory / ".lock")


def state_of(directory: Path, result: dict[str, Any]) -> str:
    """Return the state of a run, one of `STATES`.

    Args:
        directory: the run directory.
        result: the content of the run's `result.json`; empty if the file does not exist or is damaged.
    """
    if not result and is_locked(directory):  # tested only if necessary: meanwhile, no run can lock the directory
        return "running"
    if not result:
        return "damaged" if os.path.lexists(directory / RESULT) else "killed"
    return result["status"] if result["status"] in ENDED else "damaged"


def steps_of(directory: Path, result: dict[str, Any]) -> int | None:
    """Return the number of steps that a run has completed; None if it is not known.

    If the run has no result, this is the step of its newest checkpoint.
    """
    if "steps" in result:
        return result["steps"]
    try:
        check_no_link(directory / "checkpoints")
        return newest_step(directory) or None
    except UnsafeFileError:
        return None
