"""Jobs of a sweep that one process computes together: what the scheduler tells this process, and what it answers."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from runner.storage.files import write_text
from runner.sweeps.engines.base import Job
from runner.system.signals import StopRequest
from runner.system.turns import Seat

STACK = "--stack"
"""The flag of the command that computes several jobs together; its value is the file `StackFiles.jobs`."""

AUTO_STACK = 32
"""The largest number of jobs that `sweep.stack=auto` puts together."""


class StackFiles(NamedTuple):
    """The files with which a scheduler and the process of a stack speak to each other.

    Args:
        jobs: the jobs, which the scheduler writes.
        codes: the number and the exit code of each job that has ended, a line each, which the process writes.
        stop: the numbers of jobs that should save and stop while the others go on, which the scheduler writes.
        console: what the process prints that belongs to no job.
    """

    jobs: Path
    codes: Path
    stop: Path
    console: Path

    @classmethod
    def of(cls, jobs: Path) -> StackFiles:
        return cls(jobs, *(jobs.with_suffix(suffix) for suffix in (".codes", ".stop", ".stack.txt")))

    @classmethod
    def beside(cls, console: Path) -> StackFiles:
        """Return the files of the stack whose first job prints to `console`."""
        return cls.of(console.with_suffix(".stack"))

    # Of the scheduler

    def write(self, jobs: Sequence[Job], is_tried: bool) -> None:
        """Write the jobs; if `is_tried`, they are only computed together if that is faster in their first step."""
        self.remove()
        listed = [{"number": each.number, "arguments": each.arguments, "console": str(each.console)} for each in jobs]
        write_text(self.jobs, json.dumps({"jobs": listed, "is_tried": is_tried}))

    def new_codes(self, running: Collection[int]) -> list[tuple[int, int]]:
        """Return the number and the exit code of those of the `running` jobs that have ended."""
        with suppress(OSError, ValueError):
            lines = self.codes.read_text().splitlines()
            pairs = [(int(number), int(code)) for number, code in map(str.split, lines)]
            return [pair for pair in pairs if pair[0] in running]
        return []

    def ask_to_stop(self, numbers: Collection[int]) -> None:
        write_text(self.stop, json.dumps([*numbers]))

    def pass_on(self, numbers: Collection[int]) -> None:
        """Append what the process has printed to the console files of the jobs that have ended with it."""
        with suppress(OSError, ValueError):
            printed = self.console.read_text(errors="backslashreplace")
            for job in json.loads(self.jobs.read_text())["jobs"]:
                if job["number"] in numbers:
                    with Path(job["console"]).open("a", encoding="utf-8") as console:
                        console.write(printed)

    def remove(self) -> None:
        for path in (self.jobs, self.codes, self.stop):
            path.unlink(missing_ok=True)

    # Of the process

    def run(self, main: Callable[[list[str]], int]) -> None:
        """Run the jobs, each as the command `main` with its arguments; return when all have ended."""
        from runner.parallel.stack.stack import Stack  # it imports torch, which a scheduler does not need

        content = json.loads(self.jobs.read_text())
        seats, common = [], dict[str, Any]()
        for job in content["jobs"]:
            console = os.fdopen(
                locked_console(job["console"]), "w", encoding="utf-8", errors="backslashreplace", buffering=1
            )
            seats.append(Seat(job["number"], partial(main, job["arguments"]), console, common))
        with StopRequest() as stop:
            Stack(seats, self._ended, partial(self._ask, seats, stop), content["is_tried"]).run()

    def _ended(self, number: int, code: int) -> None:
        with self.codes.open("a") as file:
            file.write(f"{number} {code}\n")

    def _ask(self, seats: Sequence[Seat], stop: StopRequest) -> None:
        """Ask the jobs to stop that a signal, or the scheduler, wants to stop."""
        numbers = {seat.number for seat in seats} if stop.received else set[int]()
        if not numbers and self.stop.exists():
            with suppress(OSError, ValueError):
                numbers = {*json.loads(self.stop.read_text())}
        for seat in seats:
            if seat.number in numbers:
                seat.stop(stop.received or "SIGTERM")


def locked_console(path: str) -> int:
    """Open the console file of a job, and lock it until this process ends, once an earlier one has ended."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    fcntl.flock(file, fcntl.LOCK_EX)
    return file
