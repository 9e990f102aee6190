"""Wait for jobs of a pool, and read what they printed and how they ended; the jobs run `helpers.fake_run`."""

import json
import os
from pathlib import Path
from typing import Any

from helpers.command import processes_in, wait_until
from runner.sweeps.engines.base import Demand, Ended, Job, Pool


def job(number: int, *words: str, earlier: str = "", is_changed: bool = False, **demand: int) -> Job:
    return Job(number, list(words), Path(f"{number}.txt").absolute(), Demand(**demand), earlier, is_changed)


def processes() -> set[int]:
    """Return the IDs of the processes that jobs have started in the current directory."""
    return processes_in(Path.cwd()).keys() - {os.getpid()}


def reports_of_job(number: int) -> list[dict[str, Any]]:
    """What `fake_run` printed at each start of a job."""
    file = Path(f"{number}.txt")
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("\n")]


def wait_until_started(pool: Pool, *numbers: int) -> None:
    wait_until(lambda: (pool.wait(0.05), all(reports_of_job(number) for number in numbers))[1])


def wait_until_ended(pool: Pool, *wanted: int) -> dict[int, Ended]:
    """Wait until the `wanted` jobs have ended, and return the ends of all jobs that ended meanwhile, by job number."""
    found: dict[int, Ended] = {}
    wait_until(lambda: (found.update({each.number: each for each in pool.wait(0.05)}), set(found) >= set(wanted))[1])
    return found


def exit_codes_of(pool: Pool, *wanted: int) -> dict[int, int | None]:
    return {number: each.code for number, each in wait_until_ended(pool, *wanted).items()}
