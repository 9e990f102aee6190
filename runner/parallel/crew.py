"""The processes of a run, seen from the one that starts them: watched, and none of them left behind.

Each has a pipe to this process. It sends a beat now and then and, at the end, a report; when the pipe breaks, because
this process was killed, it takes its fellows with it. A process that dies, fails or falls silent ends the others.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import connection
from typing import Any

from runner.config import ConfigError
from runner.data.base import DataError
from runner.directory import StorageError
from runner.forkserver import METHOD
from runner.signals import StopRequest

log = logging.getLogger(__name__)

BEAT = 0.3
"""Seconds between two signs of life: well within the shortest timeout, which is one second."""

START = 60.0
"""Seconds more for the first of them: torch may come from a slow disk."""

GRACE = 2.0
"""Seconds that the others have to tell what they saw, once one has failed."""


class RankError(Exception):
    """A process of the run failed or died; `result` is how far the run had come, where rank 0 could tell."""

    def __init__(self, rank: int, what: str, trace: str = "", result: Any = None):
        super().__init__(rank, what, trace, result)
        self.rank, self.what, self.trace, self.result = rank, what, trace, result

    def __str__(self) -> str:
        return f"rank {self.rank} {self.what}"


class LostError(RuntimeError):
    """Another process did not come to where this one waited for it."""


@dataclass
class Report:
    """How a rank's work ended.

    Args:
        value: what it returned.
        refused: the config error that ended it.
        what: the exception that ended it, in a line; empty where it ended well.
        trace: where that was raised.
        result: how far the run had come.
        by_others: whether it only lost touch with the others.
    """

    value: Any = None
    refused: ConfigError | None = None
    what: str = ""
    trace: str = ""
    result: Any = None
    by_others: bool = False
    time: float = field(default_factory=time.time)

    @property
    def ended_well(self) -> bool:
        return not self.what and self.refused is None


def report_of(error: BaseException) -> Report:
    """The report of a rank that `error` ended."""
    if isinstance(error, ConfigError):
        return Report(refused=error)
    result, cause = getattr(error, "result", None), error.__cause__
    error = cause if result is not None and cause is not None else error
    told = isinstance(error, StorageError | DataError)  # a user's to mend: where in the code tells nothing
    trace = "" if told else "".join(traceback.format_exception(error))
    return Report(what=f"failed: {type(error).__name__}: {error}", trace=trace, result=result, by_others=_lost(error))


def _lost(error: BaseException) -> bool:
    """Whether `error` says that another process went away, or did not come."""
    import torch.distributed as dist

    text = str(error).lower()
    return isinstance(error, LostError | dist.DistError) or any(
        word in text for word in ("gloo", "nccl", "pair closure")
    )


# ---------------------------------------------------------------------------------------------------------------------
# In each of the processes


def attend(pipe: connection.Connection) -> Callable[[Report], None]:
    """Send signs of life until the process ends; take the fellows along when the starter is gone.

    Returns:
        What sends the report.
    """
    sending = threading.Lock()

    def send(message: Report | None) -> None:
        with sending, suppress(ConnectionError):
            pipe.send(message)

    def beat() -> None:
        pids: list[int] = []
        try:
            while True:
                if pipe.poll(BEAT):
                    pids = pipe.recv()
                else:
                    send(None)
        except (EOFError, OSError):
            for pid in pids:
                if pid != os.getpid():
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            os._exit(1)

    threading.Thread(target=beat, daemon=True).start()
    return send


# ---------------------------------------------------------------------------------------------------------------------
# In the process that starts them


class Crew:
    """Processes that work together, from their start to the last one's end.

    Args:
        work: called in each with its pipe (see `attend`) and one of `arguments`.
        timeout: seconds without a sign of life after which a process counts as lost.
    """

    def __init__(self, work: Callable[..., None], arguments: Sequence[tuple], timeout: float):
        context: Any = multiprocessing.get_context(METHOD)
        self.timeout = timeout
        self.processes: list[Any] = []
        self.pipes: list[connection.Connection] = []
        self.reports: list[Report | None] = [None] * len(arguments)
        self.silence = [-START] * len(arguments)
        try:
            for rank, its_own in enumerate(arguments):
                ours, theirs = context.Pipe()
                self.pipes.append(ours)
                with theirs:
                    process = context.Process(target=work, args=(theirs, *its_own), name=f"rank {rank}")
                    process.start()
                self.processes.append(process)
            pids = [process.pid for process in self.processes]
            log.debug("the ranks' processes: %s", " ".join(map(str, pids)))
            for pipe in self.pipes:
                with suppress(ConnectionError):  # it has ended already, as `wait` will see
                    pipe.send(pids)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait(self, stop: StopRequest) -> list[Any]:
        """What each of them returned.

        Args:
            stop: a signal that this process gets is passed on to all of them, once.

        Raises:
            ConfigError: that one of them raised.
            RankError: when one failed, died or fell silent; it names the one that did so first.
        """
        passed_on = False
        while any(report is None for report in self.reports):
            self._listen()
            if stop.received and not passed_on:
                passed_on = True
                self._signal(signal.SIGUSR1)
            if self._broken():
                raise self._blame()
        for process in self.processes:
            process.join(GRACE)
        return [report.value for report in self.reports if report]

    def close(self) -> None:
        """End those that are left, at once."""
        self._signal(signal.SIGKILL)
        for process in self.processes:
            process.join()
            process.close()
        for pipe in self.pipes:
            pipe.close()
        self.processes, self.pipes = [], []

    def _listen(self) -> None:
        """Take what the processes have to say, within a moment."""
        since = time.monotonic()
        open_pipes = {pipe: rank for rank, pipe in enumerate(self.pipes) if self.reports[rank] is None}
        ready = connection.wait([*open_pipes, *(self.processes[rank].sentinel for rank in open_pipes.values())], 0.2)
        for pipe, rank in open_pipes.items():
            # A moment in which this process did not run itself (Ctrl-Z, a laptop's lid) is nobody's silence.
            self.silence[rank] += min(time.monotonic() - since, 0.5)
            if pipe in ready:
                self._hear(rank)

    def _hear(self, rank: int) -> None:
        """Take what one of them has said."""
        with suppress(EOFError, OSError):
            while self.reports[rank] is None and self.pipes[rank].poll():
                self.reports[rank] = self.pipes[rank].recv()
                self.silence[rank] = 0.0

    def _broken(self) -> bool:
        failed = any(report is not None and not report.ended_well for report in self.reports)
        return failed or bool(self._dead()) or max(self.silence) > self.timeout

    def _dead(self) -> list[int]:
        """The ranks that ended without a report."""
        ended = [rank for rank, process in enumerate(self.processes) if not process.is_alive()]
        for rank in ended:
            self._hear(rank)  # its last word, which may have come since we listened
        return [rank for rank in ended if self.reports[rank] is None]

    def _blame(self) -> Exception:
        """The error of the rank that was the first to fail. The others have a moment to tell what they saw."""
        silent = [rank for rank, seconds in enumerate(self.silence) if seconds > self.timeout]
        until = time.monotonic() + GRACE
        while time.monotonic() < until and any(
            report is None and process.is_alive() for report, process in zip(self.reports, self.processes, strict=True)
        ):
            self._listen()
        reports = {rank: report for rank, report in enumerate(self.reports) if report and not report.ended_well}
        for report in reports.values():
            if report.refused is not None:
                return report.refused
        first = self._first(silent, reports)
        result = self.reports[0].result if self.reports[0] else None
        return RankError(*first, result=result)

    def _first(self, silent: list[int], reports: dict[int, Report]) -> tuple[int, str, str]:
        """(rank, what, trace) of the one to blame."""
        dead = {rank: self._death(rank) for rank in self._dead()}
        # NCCL's watchdog ends a process that waits in vain by SIGABRT: such a one may have died of another's silence.
        for rank, (what, by_watchdog) in dead.items():
            if not by_watchdog:
                return rank, what, ""
        ordered = sorted(reports, key=lambda rank: (reports[rank].by_others, reports[rank].time))
        if ordered and not reports[ordered[0]].by_others:
            return ordered[0], reports[ordered[0]].what, reports[ordered[0]].trace
        late = [rank for rank, report in enumerate(self.reports) if report is None and rank not in dead]
        for rank in (*silent, *late):
            what = (
                f"was not where the others waited for it: it is stopped, or hangs (parallel.timeout={self.timeout:g})"
            )
            return rank, what, ""
        for rank, (what, _) in dead.items():
            return rank, what, ""
        return ordered[0], reports[ordered[0]].what, reports[ordered[0]].trace

    def _death(self, rank: int) -> tuple[str, bool]:
        """How a process ended that left no report, and whether that may be for want of the others."""
        code = self.processes[rank].exitcode
        if code >= 0:
            return f"exited with code {code}", False
        name = signal.Signals(-code).name
        hint = " (the kernel does that where memory runs out)" if name == "SIGKILL" else ""
        return f"was killed by {name}{hint}", name == "SIGABRT"

    def _signal(self, number: signal.Signals) -> None:
        for process in self.processes:
            if process.is_alive():
                with suppress(ProcessLookupError):
                    os.kill(process.pid, number)
