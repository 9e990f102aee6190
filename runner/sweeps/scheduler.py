"""The scheduler of a sweep. It submits jobs to a pool, which gives them cores and GPUs, and records their states."""

from __future__ import annotations

import logging
import math
import os
import signal
import time
from collections import Counter, deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, ClassVar

from runner.config.errors import ConfigError
from runner.result import EXIT_CODES
from runner.storage.run_directory import StorageError, read_result
from runner.sweeps.display import Display, message
from runner.sweeps.engines.base import MAX_STACK, Ended, Engine, Job, Pool
from runner.sweeps.ledger import SETTLED, Ledger
from runner.sweeps.objectives import Objective
from runner.system.console import CRASHED, DONE, INTERRUPTED, REFUSED, STOPPED
from runner.system.signals import StopRequest

log = logging.getLogger(__name__)

STATES = {code: state for state, code in EXIT_CODES.items()} | {REFUSED: "refused", INTERRUPTED: "stopped"}
"""The state of a job that has ended, for each exit code of its command."""

_POLL_SECONDS = 0.25

AUTO_TRIALS = 8
"""How many trials of a search `sweep.stack=auto` computes together, each of which then knows less of the others."""


class JobSource:
    """The jobs of a sweep, `count` in total, in their order. A search overrides what depends on the results."""

    learns: ClassVar[bool] = False
    """Whether the next job depends on results, so that none should be taken long before it starts."""

    def __init__(self, jobs: Iterator[Job], count: int, objectives: Sequence[Objective] = ()):
        self._jobs, self._count, self.objectives = jobs, count, objectives
        self._has_measured = False
        """Whether a job has measured the metrics of the objectives, so that another one may lack some."""

    def next(self) -> Job | None:
        """Return the next job; None if there is none, or if the next one depends on the results of running jobs."""
        return next(self._jobs, None)

    def __len__(self) -> int:
        return self._count

    def tell(self, number: int, code: int, result: dict[str, Any]) -> None:
        """Called when job `number` has ended; raises a ConfigError if the sweep cannot go on."""
        if code == DONE:
            self._values(number, result)

    def _values(self, number: int, result: dict[str, Any]) -> list[float]:
        """Return the values of the objectives of a job that is done; NaN for a metric without a value."""
        values = [each.value(result, may_lack=self._has_measured) for each in self.objectives]
        for objective, value in zip(self.objectives, values, strict=True):
            if math.isnan(value):
                log.warning("job %d has no value of %s, and counts as worse than the others", number, objective.tag)
        self._has_measured = True
        return values

    def close(self) -> None:
        """Finish the work of this source, when no job is running anymore."""

    def is_complete(self, num_settled: int) -> bool:
        """Return whether the sweep is complete, given that `num_settled` jobs need not run again."""
        return num_settled >= len(self)

    def unpromising(self, running: Collection[int]) -> list[int]:
        """Return those of the `running` jobs that should save and stop, because others are better; `next` may later
        return a stopped job again, which then continues from its checkpoint.
        """
        return []


class Scheduler:
    """Runs the jobs of a source in a pool, records their states in the ledger, and shows them on the display."""

    def __init__(self, source: JobSource, pool: Pool, ledger: Ledger, options: Engine, display: Display):
        self.source, self.pool, self.ledger, self.options, self.display = source, pool, ledger, options, display
        self._waiting: deque[Job] = deque()
        self._running: dict[int, Job] = {}
        self._pruned: set[int] = set()
        self._attempts: Counter[int] = Counter()
        self._console_bytes: dict[int, int] = {}
        """For each job that was started, the size of its console file before its last attempt."""
        self._codes: dict[int, int] = {}
        self._stopping = False
        self._error: StorageError | ConfigError | None = None

    def run(self, stop: StopRequest) -> list[int]:
        """Run all jobs, and return their exit codes in the order of their numbers.

        A pruned job counts as done (0). After the first stop signal, which `stop` receives, the running jobs save and
        exit with code 75; jobs that have not begun are missing from the list.

        Raises:
            KeyboardInterrupt: if the user presses Ctrl-C after a stop signal.
            StorageError: if the ledger, or the study of a search, cannot be written. The running jobs have saved.
            ConfigError: the same, if the result of a job shows that the sweep cannot continue; or if a cluster rejects
                the first jobs.
        """
        settled = self.ledger.settled_states.items()
        self.display.states.update((number, state) for number, state in settled if number < len(self.source))
        while not self._stopping or self._running:
            if stop.received:
                self.stop(stop.received, "; press Ctrl-C to stop without saving")
            started = self._start_jobs(stop)
            if not (self._running or started or self._waiting or stop.received):
                break
            for ended in self.pool.wait(_POLL_SECONDS):
                self._end(ended)
            if not self._stopping and (pruned := self.source.unpromising(self._running.keys() - self._pruned)):
                self._pruned.update(pruned)
                self.pool.stop(pruned)
            self.display.refresh()
        if self._error is not None:
            raise self._error
        return [self._codes[number] for number in sorted(self._codes)]

    def stop(self, reason: str, hint: str = "") -> None:
        if self._stopping:
            return
        self._stopping = True
        count = len(self._running)
        what = "1 running job saves and stops" if count == 1 else f"{count} running jobs save and stop"
        self.display.line(f"{reason}: {what}{hint}")
        self.pool.stop(list(self._running))

    def _start_jobs(self, stop: StopRequest) -> int:
        """Start jobs while the pool has room; return the number of jobs that were started or needed no start."""
        count = 0
        while not (self._stopping or stop.received) and self.pool.has_room():
            self._look_ahead()
            if not self._waiting:
                break
            first = self._waiting[0]
            alike = [job for job in self._waiting if job.stack_key == first.stack_key and self._needs_start(job)]
            jobs = alike[: self.pool.stack_size(len(alike))] if first in alike and first.stack_key else [first]
            if not self._start(jobs):
                break
            for job in jobs:
                self._waiting.remove(job)
            count += len(jobs)
        return count

    def _look_ahead(self) -> None:
        """Take the next job from the source; if jobs are computed together, those among which to look for them."""
        stack = self.options.stack
        most = stack if isinstance(stack, int) and (stack == 1 or self.source.learns) else MAX_STACK * 4
        most = AUTO_TRIALS if stack == "auto" and self.source.learns else most
        while len(self._waiting) < most:
            job = None
            with self._errors_stop_the_sweep():
                job = self.source.next()
            if job is None:
                break
            self._waiting.append(job)

    def _is_settled(self, job: Job) -> bool:
        entry = self.ledger.jobs.get(job.number, {})
        return entry.get("code") in SETTLED and entry.get("config_hash") == job.config_hash

    def _needs_start(self, job: Job) -> bool:
        return not (job.refusal or self._is_settled(job))

    def _start(self, jobs: Sequence[Job]) -> bool:
        """Start `jobs`, several of them together. If one is settled or refused, the next may start.

        Return False if they wait for room.
        """
        job = jobs[0]
        if self._is_settled(job):
            code = self.ledger.jobs[job.number]["code"]
            self._codes[job.number] = code
            self.display.line(f"{self.display.title(job)}: already {STATES[code]}, {os.path.relpath(job.directory)}")
            with self._errors_stop_the_sweep():
                self.source.tell(job.number, code, read_result(job.directory))
            return True
        if job.refusal:
            self._record(job, REFUSED, error=job.refusal)
            return True
        begun = []
        for job in jobs:
            job.console.parent.mkdir(exist_ok=True)
            self._console_bytes[job.number] = job.console.stat().st_size if job.console.exists() else 0
            entry = self.ledger.jobs.get(job.number, {})
            earlier = entry.get("slot", "") if entry.get("state") == "running" else ""
            is_changed = entry.get("config_hash") != job.config_hash
            begun.append(job._replace(earlier=earlier, is_changed=is_changed))
        try:
            slot = self.pool.submit(begun[0]) if len(begun) == 1 else self.pool.submit_stack(begun)
        except ConfigError as error:
            for job in jobs:
                self._record(job, REFUSED, error=str(error))
            return True
        if slot is None:
            return False
        for job in jobs:
            self._running[job.number] = job
            self._attempts[job.number] += 1
            self._pruned.discard(job.number)
            tries = self.ledger.jobs.get(job.number, {}).get("tries", 0) + 1
            where = {"slot": slot, "tries": tries, "started": time.time()}
            self._update(job, **where, state="running", code=None, error=None, seconds=None)
            self.display.started(job, slot)
        return True

    def _end(self, ended: Ended) -> None:
        """Record the end of a job. If the job crashed and has retries left, queue it again instead."""
        job, code = self._running.pop(ended.number), ended.code
        result = read_result(job.directory)
        recorded = EXIT_CODES.get(result.get("status", ""))
        if code is None:  # the pool does not know it, but the result of the run may tell it
            code = recorded
        text = "" if code in STATES else how_it_died(ended)
        if code == DONE != recorded:  # something called os._exit(0)
            code, text = CRASHED, "ended with exit code 0 before it was done"
        code = code if code in STATES else CRASHED
        if code == CRASHED and not self._stopping and self._attempts[job.number] <= self.options.retries:
            why = text or self._reason(job, code, result)
            self._update(job, state="queued", error=why)
            self.display.line(f"{self.display.title(job)}: {why}\n  it will be started again")
            self._waiting.append(job)
            return
        started = self.ledger.jobs[job.number].get("started", time.time())
        self._record(job, code, error=text, seconds=round(time.time() - started, 3))

    def _record(self, job: Job, code: int, error: str, **more: Any) -> None:
        result = read_result(job.directory) if code != REFUSED else {}
        error = error or self._reason(job, code, result)
        state = "pruned" if code == STOPPED and job.number in self._pruned else STATES[code]
        self._codes[job.number] = DONE if state == "pruned" else code
        self._update(job, state=state, code=code, error=error, **more)
        self.display.ended(job, state, error, result)
        if self.options.fail_fast and state in ("crashed", "refused", "diverged"):
            self.stop("sweep.fail_fast=true")
        with self._errors_stop_the_sweep():
            self.source.tell(job.number, code, result)

    def _reason(self, job: Job, code: int, result: dict[str, Any]) -> str:
        """Return the reason why a job ended with `code`, in its own words; empty if it is done or was stopped."""
        printed = message(job.console, self._console_bytes.get(job.number, 0))
        if code == REFUSED:
            return printed
        said = "\n".join(result.get("error", "").splitlines()[:10])
        return said or (printed.rpartition("\n")[2] if code == CRASHED else "")

    def _update(self, job: Job, **changes: Any) -> None:
        known = {"overrides": list(job.overrides), "config_hash": job.config_hash, "directory": job.directory.name}
        with self._errors_stop_the_sweep():
            self.ledger.update(job.number, **known, **changes)

    @contextmanager
    def _errors_stop_the_sweep(self) -> Iterator[None]:
        """A context in which the ledger or the study is written: without them, the sweep could not be resumed."""
        try:
            yield
        except (StorageError, ConfigError, OSError) as error:
            if isinstance(error, OSError):
                error = StorageError(error.filename or self.ledger.path, str(error.strerror))
            if self._error is None:
                self._error = error
                self.stop(str(error).splitlines()[0].rstrip(";:"))


def how_it_died(ended: Ended) -> str:
    """Describe the end of a job whose exit code is unknown or not in `STATES`: `was killed by SIGKILL`, for example."""
    if ended.code is None:
        return f"was lost{f': {ended.reason}' if ended.reason else ''}"
    if ended.code < 0:
        with suppress(ValueError):
            return f"was killed by {signal.Signals(-ended.code).name}"
    return f"ended with exit code {ended.code}"
