"""The scheduler of a sweep. It submits the jobs to a pool, and records the state of each job in the ledger."""

from __future__ import annotations

import signal
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from runner.config.errors import ConfigError
from runner.storage.ledger_file import is_plain_name
from runner.storage.run_directory import StorageError, read_result
from runner.sweep.console import message
from runner.sweep.display import Display
from runner.sweep.engines.base import Demand, Ended, Engine, Job, Pool, Started
from runner.sweep.ledger import Ledger
from runner.system.exit_codes import CRASHED, DIVERGED, DONE, INTERRUPTED, REFUSED, STOPPED
from runner.system.signals import StopRequest
from runner.system.utf8 import printable

STATES = {
    DONE: "done",
    CRASHED: "crashed",
    REFUSED: "refused",
    DIVERGED: "diverged",
    STOPPED: "stopped",
    INTERRUPTED: "stopped",
}
"""The state of a job that has ended, for each exit code of its command."""

_CODES = {state: code for code, state in reversed(STATES.items())}

_POLL_SECONDS = 0.25


class PlannedJob(NamedTuple):
    """A job whose command has been planned.

    Args:
        number: the number of the job, starting at 0.
        overrides: the overrides of the job.
        arguments: the command-line arguments of the job.
        directory: the run directory of the job.
        config_hash: a hash of the job's config.
        demand: the processes, GPUs and CPU threads that the job needs.
        refusal: the error message if the config is already known to be invalid; otherwise empty.
    """

    number: int
    overrides: list[str]
    arguments: list[str]
    directory: Path
    config_hash: str
    demand: Demand = Demand()
    refusal: str = ""


class JobSource(ABC):
    """The source of a sweep's jobs, such as a grid of all combinations or a search."""

    @abstractmethod
    def next(self) -> PlannedJob | None:
        """Return the next job; None if no job is available now.

        No job is available if all jobs have been returned, or if the next job depends on the results of running jobs.
        """

    @abstractmethod
    def __len__(self) -> int:
        """Return the total number of jobs."""

    def tell(self, number: int, code: int, result: dict[str, Any]) -> None:
        """Process the exit code and the result of job `number`, which has ended.

        Raises:
            ConfigError: if the result shows that the sweep cannot continue, for example because the metric is missing.
        """

    def close(self) -> None:
        """Finish the work of this source. The sweep calls this method when no job is running anymore."""

    def is_complete(self, num_settled: int) -> bool:
        """Return whether the sweep is complete, given that `num_settled` jobs need not run again."""
        return num_settled >= len(self)

    def unpromising(self, running: Collection[int]) -> list[int]:
        """Return the numbers of the running jobs that should save a checkpoint and stop, because others are better.

        `next` may later return a stopped job again. The job then continues from its checkpoint.

        Args:
            running: the numbers of the running jobs that have not been asked to stop yet.
        """
        return []


class Scheduler:
    """The scheduler, which runs the jobs of a sweep.

    Args:
        source: the source of the jobs.
        pool: the pool that runs the jobs.
        ledger: the ledger that records the state of each job.
        options: the options of the sweep.
        display: the display that shows the progress to the user.
    """

    def __init__(self, source: JobSource, pool: Pool, ledger: Ledger, options: Engine, display: Display):
        self.source, self.pool, self.ledger, self.options, self.display = source, pool, ledger, options, display
        self._waiting: deque[PlannedJob] = deque()
        self._running: dict[int, PlannedJob] = {}
        self._earlier: dict[int, Ended | None] = {}
        """For each job of an earlier command that the source has not returned yet: how it ended; None while it runs."""
        self._outdated: set[int] = set()
        """Jobs in `_earlier` that were asked to stop, because the source's job of this number has another config."""
        self._pruned: set[int] = set()
        self._attempts: Counter[int] = Counter()
        self._printed_before: dict[int, int] = {}
        """For each job that was started, the size of its console file in bytes before its last attempt."""
        self._codes: dict[int, int] = {}
        self._stopping = False
        self._error: StorageError | ConfigError | None = None

    def run(self, stop: StopRequest) -> list[int]:
        """Run all jobs, and return their exit codes in the order of their numbers.

        A pruned job counts as done (0). If the sweep is stopped, jobs that have not begun are missing from the list.

        Args:
            stop: the handler of stop signals. After the first stop signal, the running jobs save a checkpoint and exit
                with code 75.

        Raises:
            KeyboardInterrupt: if the user presses Ctrl-C after a stop signal. The jobs are killed when the context of
                the pool ends.
            StorageError: if the ledger, or the study of a search, cannot be written.
            ConfigError: if a cluster rejects the first jobs, or if the result of a job shows that the sweep cannot
                continue. A StorageError or ConfigError is raised only after the running jobs have been asked to save a
                checkpoint and have exited.
        """
        self._take_over()
        while not self._stopping or self._running or self._has_earlier():
            if stop.received:
                self.stop(stop.received, "; press Ctrl-C to stop without saving")
            started = self._start_jobs()
            if not self._running and not started and not self._waiting and not self._has_earlier():
                break
            for ended in self.pool.wait(_POLL_SECONDS):
                if ended.number in self._earlier:
                    self._earlier[ended.number] = ended
                else:
                    self._end(ended)
            self._prune()
            self.display.refresh()
        for number, ended in self._earlier.items():
            if ended is not None:
                self._record_earlier(number, ended)
        if self._error is not None:
            raise self._error
        return [self._codes[number] for number in sorted(self._codes)]

    def stop(self, reason: str, hint: str = "") -> None:
        """Start no more jobs, and ask the running jobs to save a checkpoint and exit.

        Args:
            reason: why the sweep is stopped.
            hint: the end of the message to the user.
        """
        if self._stopping:
            return
        self._stopping = True
        running = [*self._running, *(number for number, ended in self._earlier.items() if ended is None)]
        count = len(running)
        what = "1 running job saves and stops" if count == 1 else f"{count} running jobs save and stop"
        self.display.line(f"{reason}: {what}{hint}")
        self._ask_to_stop(running)

    def _take_over(self) -> None:
        """Count the jobs that an earlier command has settled, and let the pool take over those that still run."""
        settled = self.ledger.settled_states.items()
        self.display.settled_before({number: state for number, state in settled if number < len(self.source)})
        for number, entry in self.ledger.jobs.items():
            if entry.get("state") == "running":
                job = Job(number, [], self.ledger.console(number), Demand())
                if self.pool.adopt(job, Started(entry.get("slot", ""), entry.get("pid", 0))):
                    self._earlier[number] = None
        if count := len(self._earlier):
            what = "job of an earlier command still runs" if count == 1 else "jobs of an earlier command still run"
            self.display.line(f"{count} {what}")

    def _has_earlier(self) -> bool:
        """Return whether any of the jobs in `_earlier` is still running."""
        return None in self._earlier.values()

    def _ask_to_stop(self, numbers: list[int]) -> None:
        """Ask jobs to save a checkpoint and exit.

        Jobs that cannot be asked keep running, but the scheduler no longer waits for them.

        Args:
            numbers: the numbers of the jobs.
        """
        for number in self.pool.stop(numbers):
            if self._running.pop(number, None) is not None:
                self._codes[number] = STOPPED
            self._earlier.pop(number, None)

    def _prune(self) -> None:
        """Ask unpromising jobs to save a checkpoint and stop."""
        pruned = [] if self._stopping else self.source.unpromising(self._running.keys() - self._pruned)
        self._pruned.update(pruned)
        if pruned:
            self._ask_to_stop(pruned)

    def _start_jobs(self) -> int:
        """Start jobs while the pool has room; return the number of jobs that were started or needed no start."""
        count = 0
        while not self._stopping and self.pool.has_room() and (job := self._next()) is not None:
            if not self._started(job):
                self._waiting.appendleft(job)
                break
            count += 1
        return count

    def _next(self) -> PlannedJob | None:
        if self._waiting:
            return self._waiting.popleft()
        try:
            return self.source.next()
        except OSError as error:  # a search records its trials in a file
            self._fail(_storage_error(error, self.ledger.path))
            return None

    def _started(self, job: PlannedJob) -> bool:
        """Start `job` if this is necessary and possible; return False if the job has to wait, otherwise True.

        A job is not started if it need not run again (see `Ledger.settled`), if it is refused, or if an earlier command
        started it with the same config and the pool has taken it over.

        A job has to wait while the pool has no room for it. If an earlier command started the job with another config,
        the earlier job is asked to save a checkpoint and exit, and the new job has to wait until the earlier job ends.
        """
        code = self.ledger.settled(job.number, job.config_hash)
        if code is not None:
            self._codes[job.number] = code
            self.display.known(job, STATES[code])
            self._tell(job.number, code, read_result(job.directory))
            return True
        if job.refusal:
            self._record(job, REFUSED, error=job.refusal)
            return True
        entry, console = self.ledger.jobs.get(job.number, {}), self.ledger.console(job.number)
        command = Job(job.number, job.arguments, console, job.demand)
        if job.number in self._earlier and entry.get("config_hash") != job.config_hash:
            if self._earlier[job.number] is None:  # it trains with another config: an option file was edited
                if job.number not in self._outdated:
                    self._outdated.add(job.number)
                    self.display.line(f"{self.display.title(job)} runs with another config: it saves and stops first")
                    self._ask_to_stop([job.number])
                return False
            del self._earlier[job.number]
        if job.number in self._earlier:
            ended = self._earlier.pop(job.number)
            self._running[job.number] = job
            self.display.started(job, f"{printable(entry.get('slot', ''))}, by an earlier command", console)
            if ended is not None:
                self._end(ended)
            return True
        console.parent.mkdir(exist_ok=True)
        self._printed_before[job.number] = console.stat().st_size if console.exists() else 0
        try:
            started = self.pool.submit(command)
        except ConfigError as error:
            self._record(job, REFUSED, error=str(error))
            return True
        if started is None:
            return False
        self._running[job.number] = job
        self._attempts[job.number] += 1
        self._pruned.discard(job.number)
        where = {"slot": started.slot, "pid": started.pid, "tries": entry.get("tries", 0) + 1, "started": time.time()}
        self._update(job, **where, state="running", code=None, error=None, seconds=None)
        self.display.started(job, started.slot, console)
        return True

    def _end(self, ended: Ended) -> None:
        """Record the end of a job. If the job crashed and has retries left, queue it again instead."""
        job = self._running.pop(ended.number)
        code = _exit_code(ended, job.directory)
        text = "" if code in STATES else how_it_died(ended)
        code = code if code in STATES else CRASHED
        if code == CRASHED and not self._stopping and self._attempts[job.number] <= self.options.retries:
            why = text or self._reason(job.number, code, read_result(job.directory))
            self._update(job, state="queued", error=why)
            self.display.line(f"{self.display.title(job)}: {why}\n  it will be started again")
            self._waiting.append(job)
            return
        started = self.ledger.jobs[job.number].get("started", time.time())
        self._record(job, code, error=text, seconds=round(time.time() - started, 3))
        if code in (CRASHED, REFUSED) and self.options.on_failure == "stop":
            self.stop(f"{self.display.title(job)} failed, and sweep.on_failure=stop")

    def _record_earlier(self, number: int, ended: Ended) -> None:
        """Record in the ledger the end of a job that an earlier command started.

        This method is called if the sweep is stopped before the source has returned the job. The source does not learn
        from this method how the job ended. When a later command resumes the sweep, and the source returns the job, the
        scheduler either tells the source how the job ended, or starts the job again if this is necessary.

        Args:
            number: the number of the job.
            ended: how the job ended.
        """
        entry = self.ledger.jobs[number]
        name = entry.get("directory", "")
        directory = self.ledger.path / name if is_plain_name(name) else None
        code = _exit_code(ended, directory)
        code = code if code in STATES else CRASHED
        self._codes[number] = code
        error = self._reason(number, code, {} if directory is None else read_result(directory))
        try:
            self.ledger.update(number, state=STATES[code], code=code, error=error)
        except StorageError as failure:
            self._fail(failure)

    def _record(self, job: PlannedJob, code: int, error: str, **more: Any) -> None:
        console = self.ledger.console(job.number)
        result = read_result(job.directory) if code != REFUSED else {}
        error = error or self._reason(job.number, code, result)
        state = "pruned" if code == STOPPED and job.number in self._pruned else STATES[code]
        self._codes[job.number] = DONE if state == "pruned" else code
        self._update(job, state=state, code=code, error=error, **more)
        self.display.ended(job, state, error, result, console)
        self._tell(job.number, code, result)

    def _reason(self, number: int, code: int, result: dict[str, Any]) -> str:
        """Return the reason why a job ended with `code`, in its own words; empty if it is done or was stopped."""
        printed = message(self.ledger.console(number), self._printed_before.get(number, 0))
        if code == REFUSED:
            return printed
        said = "\n".join(result.get("error", "").splitlines()[:10])
        return said or (printed.rpartition("\n")[2] if code == CRASHED else "")

    def _tell(self, number: int, code: int, result: dict[str, Any]) -> None:
        try:
            self.source.tell(number, code, result)
        except ConfigError as error:
            self._fail(error)
        except OSError as error:  # a search records its trials in a file
            self._fail(_storage_error(error, self.ledger.path))

    def _update(self, job: PlannedJob, **changes: Any) -> None:
        """Update the entry of `job` in the ledger. If the ledger cannot be written, stop the sweep.

        Without the ledger, a later command could not find the running jobs.
        """
        known = {"overrides": job.overrides, "config_hash": job.config_hash, "directory": job.directory.name}
        try:
            self.ledger.update(job.number, **known, **changes)
        except StorageError as error:
            self._fail(error)

    def _fail(self, error: StorageError | ConfigError) -> None:
        if self._error is None:
            self._error = error
            self.stop(str(error).splitlines()[0].rstrip(";:"))


def _storage_error(error: OSError, path: Path) -> StorageError:
    return StorageError(error.filename or path, str(error.strerror))


def _exit_code(ended: Ended, directory: Path | None) -> int | None:
    """Return the exit code of a job; None if it is not known.

    The pool may not know the exit code, for example if an earlier command started the job. The exit code is then
    derived from the result in `directory`, the run directory of the job, if there is a result.
    """
    if ended.code is not None or directory is None:
        return ended.code
    return _CODES.get(read_result(directory).get("status", ""))


def how_it_died(ended: Ended) -> str:
    """Describe the end of a job whose exit code is unknown or not in `STATES`: `was killed by SIGKILL`, for example."""
    if ended.code is None:
        return f"was lost{f': {ended.reason}' if ended.reason else ''}"
    if ended.code < 0:
        with suppress(ValueError):
            return f"was killed by {signal.Signals(-ended.code).name}"
    return f"ended with exit code {ended.code}"
