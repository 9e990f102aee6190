"""`python -m helpers.storage_work create|hold`: what several processes do in one directory at once."""

from __future__ import annotations

import sys
from pathlib import Path

from runner.storage import run_directory

SECOND = "2026-01-02_03-04-05"
"""The time at which all directories are created."""


def create(count: int = 5) -> None:
    """Create `count` run directories once a line is read, and print them; all in the same second."""
    run_directory.time.strftime = lambda *_: SECOND
    print("ready", flush=True)
    sys.stdin.readline()
    for _ in range(count):
        print(run_directory.create(Path("outputs") / "same"))


def hold() -> None:
    """Lock the current directory, say whether that worked, and hold it until standard input is closed."""
    lock = run_directory.lock(Path())
    print(lock is not None, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    {"create": create, "hold": hold}[sys.argv[1]]()
