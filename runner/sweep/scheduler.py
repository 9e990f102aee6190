"""The scheduler: it hands the jobs of a sweep to a pool, and records in the ledger what became of each of them."""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import time
from abc import ABC, abstractmethod
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from runner.config.errors import ConfigError
from runner.storage.run_directory import StorageError, read_result
from runner.storage.safe_read import open_regular
from runner.sweep.display import Display
from runner.sweep.engines.base import Demand, Ended, Engine, Job, Pool
from runner.sweep.ledger import SETTLED, Ledger
from runner.system.signals import StopRequest

log = logging.getLogger(__name__)

STATES = {0: "done", 1: "crashed", 2: "refused", 3: "diverged", 75: "stopped", 130: "stopped"}
"""The state of a job that has ended, by the exit code of its command."""

CRASHED, REFUSED, STOPPED = 1, 2, 75

_POLL_SECONDS = 0.25


class PlannedJob(NamedTuple):
    """A job that can be started.

    Args:
        number: the number of the job, from 0.
        overrides: the overrides of the job.
        arguments: the arguments of its command.
        directory: its run directory.
        config_hash: hash of its config.
        demand: what it needs.
        refusal: why its config cannot run; empty if that is not known yet.
    """

    number: int
    overrides: list[str]
    arguments: list[str]
    directory: Path
    config_hash: str
    demand: Demand = Demand()
    refusal: str = ""


class JobSource(ABC):
    """Where the jobs of a sweep come from."""

    @abstractmethod
    def next(self) -> PlannedJob | None:
        """Return the next job; None if there is none now: all have been returned, or the next depends on results."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of all jobs."""

    def tell(self, number: int, code: int, result: dict[str, Any]) -> None:
        """Receive the exit code and the result of job `number`, which has ended."""


class Scheduler:
    """Runs a sweep.

    Args:
        source: yields the jobs.
        pool: runs them.
        ledger: records what became of each.
        options: the options of the sweep.
        display: shows it to the user.
    """

    def __init__(self, source: JobSource, pool: Pool, ledger: Ledger, options: Engine, display: Display):
        self.source, self.pool, self.ledger, self.options, self.display = source, pool, ledger, options, display
        self._waiting: deque[PlannedJob] = deque()
        self._running: dict[int, PlannedJob] = {}
        self._adopted: set[int] = set()
        self._codes: dict[int, int] = {}
        self._stopping = False
        self._unwritten: StorageError | None = None

    def run(self, stop: StopRequest) -> list[int]:
        """Run all jobs, and return their exit codes.

        Args:
            stop: the first stop signal lets the running jobs save and exit, with code 75.

        Raises:
            KeyboardInterrupt: at Ctrl-C after a stop signal; all jobs have been killed.
            StorageError: if the ledger cannot be written; the running jobs have saved and exited.
        """
        while not (self._stopping and not self._running):
            if stop.received:
                self.stop(stop.received)
            started = self._start_jobs()
            if not self._running and not started and not self._waiting:
                break
            for ended in [*self.pool.wait(_POLL_SECONDS), *self._ended_adopted()]:
                self._end(ended)
            self.display.refresh()
        if self._unwritten is not None:
            raise self._unwritten
        return [self._codes[number] for number in sorted(self._codes)]

    def stop(self, reason: str) -> None:
        """Start no more jobs, and let the running ones save and exit."""
        if self._stopping:
            return
        self._stopping = True
        count = len(self._running)
        what = "1 running job saves and stops" if count == 1 else f"{count} running jobs save and stop"
        self.display.line(f"{reason}: {what}; Ctrl-C again ends all at once")
        self.pool.stop(list(self._running))
        for number in self._adopted:
            pid, console = self.ledger.jobs[number].get("pid", 0), self.ledger.console(number)
            if is_open_in(pid, console):  # anybody may have written the ledger
                with suppress(OSError):
                    os.kill(pid, signal.SIGTERM)
            else:  # it goes on without this scheduler, which must not wait for it
                self._running.pop(number)
                self._codes[number] = STOPPED
        self._adopted &= self._running.keys()

    def _start_jobs(self) -> int:
        """Start jobs while there is room, and return how many were started, or ended without being started."""
        count = 0
        while not self._stopping and (job := self._next()) is not None:
            if not self._started(job):
                self._waiting.appendleft(job)
                break
            count += 1
        return count

    def _next(self) -> PlannedJob | None:
        return self._waiting.popleft() if self._waiting else self.source.next()

    def _started(self, job: PlannedJob) -> bool:
        """Start `job` unless it has ended already or is running; return False if it has to wait for room."""
        entry = self.ledger.jobs.get(job.number, {})
        code = self.ledger.settled(job.number, job.config_hash)
        if code is not None:
            self._codes[job.number] = code
            self.display.known(job, STATES[code])
            self.source.tell(job.number, code, read_result(job.directory))
            return True
        if job.refusal:
            self._record(job, REFUSED, error=job.refusal)
            return True
        console = self.ledger.console(job.number)
        if entry.get("state") == "running" and is_running(console):
            self._running[job.number] = job
            self._adopted.add(job.number)
            self.display.line(f"{self.display.title(job)} is still running, started by an earlier command")
            return True
        console.parent.mkdir(exist_ok=True)
        try:
            started = self.pool.submit(Job(job.number, job.arguments, console, job.demand))
        except ConfigError as error:
            self._record(job, REFUSED, error=str(error))
            return True
        if started is None:
            return False
        self._running[job.number] = job
        changes = {"overrides": job.overrides, "config_hash": job.config_hash, "directory": job.directory.name}
        tries = entry.get("tries", 0) + 1
        where = {"slot": started.slot, "pid": started.pid, "tries": tries, "started": time.time()}
        self._update(job.number, **changes, **where, state="running")
        self.display.started(job, started.slot, console)
        return True

    def _ended_adopted(self) -> list[Ended]:
        """Return the jobs of an earlier command that have ended; their results say how."""
        ended = [number for number in self._adopted if not is_running(self.ledger.console(number))]
        self._adopted -= set(ended)
        codes = {state: code for code, state in reversed(STATES.items())}
        results = {number: read_result(self._running[number].directory) for number in ended}
        return [Ended(number, codes.get(results[number].get("status", ""))) for number in ended]

    def _end(self, ended: Ended) -> None:
        """Record the end of a job; if it crashed and has retries left, start it again instead."""
        job = self._running.pop(ended.number)
        entry = {"tries": 1, "started": time.time(), **self.ledger.jobs[ended.number]}
        code = ended.code if ended.code in STATES else CRASHED
        text = "" if ended.code in STATES else how_it_died(ended)
        failed = code == CRASHED
        if failed and not self._stopping and entry["tries"] <= self.options.retries:
            self._update(ended.number, state="queued", error=text or last_line(self.ledger.console(ended.number)))
            self.display.line(f"{self.display.title(job)} {text or 'crashed'}: it is started again")
            self._waiting.append(job)
            return
        self._record(job, code, error=text, seconds=round(time.time() - entry["started"], 3))
        if code in (CRASHED, REFUSED) and self.options.on_failure == "stop":
            self.stop(f"{self.display.title(job)} failed, and sweep.on_failure=stop")

    def _record(self, job: PlannedJob, code: int, error: str, **more: Any) -> None:
        console = self.ledger.console(job.number)
        if code not in SETTLED and not error:
            error = last_line(console) if code != REFUSED else message(console)
        self._codes[job.number] = code
        result = read_result(job.directory) if code != REFUSED else {}
        known = {"overrides": job.overrides, "config_hash": job.config_hash, "directory": job.directory.name}
        self._update(job.number, **known, state=STATES[code], code=code, error=error, **more)
        self.display.ended(job, STATES[code], error, result, console)
        self.source.tell(job.number, code, result)

    def _update(self, number: int, **changes: Any) -> None:
        """Write the ledger; if that is impossible, let the running jobs save and exit: nobody could find them again."""
        try:
            self.ledger.update(number, **changes)
        except StorageError as error:
            if self._unwritten is None:
                self._unwritten = error
                self.stop(str(error).splitlines()[0])


def is_running(console: Path) -> bool:
    """Return whether a process of the job that prints to `console` is alive: it holds a lock on the file."""
    try:
        with open_regular(console) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def is_open_in(pid: int, path: Path) -> bool:
    """Return whether the process `pid` has opened the file `path`; False where there is no /proc to see it in."""
    try:
        return any(os.path.samefile(file, path) for file in Path(f"/proc/{pid}/fd").iterdir() if file.exists())
    except OSError:
        return False


def how_it_died(ended: Ended) -> str:
    """Return how a job ended whose exit code is not one of the command's."""
    if ended.code is None:
        return f"was lost{f': {ended.reason}' if ended.reason else ''}"
    if ended.code < 0:
        with suppress(ValueError):
            return f"was killed by {signal.Signals(-ended.code).name}"
    return f"ended with exit code {ended.code}"


def message(console: Path) -> str:
    """Return the last ten lines that a job printed."""
    try:
        with open_regular(console) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 20_000))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join([line for line in lines if line.strip()][-10:])


def last_line(console: Path) -> str:
    """Return the last line that a job printed; empty if it printed nothing."""
    return message(console).rpartition("\n")[2]
