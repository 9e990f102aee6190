"""`python -m helpers.run_directory_processes create|hold` is run by several processes at once, in one directory."""

from __future__ import annotations

import sys
from pathlib import Path

from runner.storage import run_directory

FIXED_TIME = "2026-01-02_03-04-05"
"""The time at which all directories are created."""


def create_run_directories(count: int = 5) -> None:
    """Read a line, then create `count` run directories and print their paths.

    The names of all directories contain the same time.
    """
    run_directory.time.strftime = lambda *_: FIXED_TIME
    print("ready", flush=True)
    sys.stdin.readline()
    for _ in range(count):
        print(run_directory.create(Path("outputs") / "same"))


def hold_lock() -> None:
    """Lock the current directory, print whether that worked, and hold the lock until standard input is closed."""
    lock = run_directory.lock(Path())
    print(lock is not None, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    {"create": create_run_directories, "hold": hold_lock}[sys.argv[1]]()
