"""The supervisor of a run's ranks, which kills all ranks and ends the run if a rank fails, dies or hangs.

Each rank has a pipe to the supervisor, over which the rank sends heartbeats and, at the end, a report. If the pipe
breaks because the supervisor was killed, the rank kills the other ranks and exits.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from multiprocessing import connection
from typing import Any

from runner.config.errors import ConfigError, described
from runner.data.base import DataError
from runner.storage.run_directory import StorageError
from runner.system import torch_errors
from runner.system.forkserver import without_main_module
from runner.system.signals import StopRequest

log = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 0.3  # well below the shortest allowed timeout, which is one second
START_SECONDS = 60.0  # more for a rank's first heartbeat, because torch may be imported from a slow disk
GRACE_SECONDS = 2.0  # for the reports of the other ranks after a rank has failed
GIVE_UP = "give up"
"""The message that tells all ranks that a rank has failed or hangs, so that they stop waiting for that rank."""
_UNKNOWN_EXIT = 255
"""What `multiprocessing` reports for every rank if the fork server, which knows the exit codes, is gone."""


class RankError(Exception):
    """Raised when a rank failed, died or hung; for `what`, `trace` and `result`, that of rank 0, see `Report`."""

    def __init__(self, rank: int, what: str, trace: str = "", result: Any = None):
        super().__init__(rank, what, trace, result)
        self.rank, self.what, self.trace, self.result = rank, what, trace, result

    def __str__(self) -> str:
        return f"rank {self.rank} {self.what}"


class LostError(RuntimeError):
    """Raised when another rank did not reach the point where this rank waited for it."""


@dataclass
class Report:
    """The outcome of a rank: its return value, the config error that ended it, or `what` else did, in one line.

    `trace` is the traceback of that exception, empty if its message says enough; `result` that of the run until then.
    """

    value: Any = None
    refused: ConfigError | None = None
    what: str = ""
    trace: str = ""
    result: Any = None
    by_others: bool = False  # whether the exception only means that another rank is gone
    time: float = field(default_factory=time.time)

    @property
    def succeeded(self) -> bool:
        return not self.what and self.refused is None


def report_of(error: BaseException) -> Report:
    """Return the report of a rank that has ended with `error`."""
    if isinstance(error, ConfigError):
        return Report(refused=error)
    result, cause = getattr(error, "result", None), error.__cause__
    error = cause if result is not None and cause is not None else error
    explained = isinstance(error, StorageError | DataError | ConfigError)  # a traceback would not help
    trace = "" if explained else "".join(traceback.format_exception(error))
    by_others = isinstance(error, LostError) or torch_errors.is_lost_peer(error)
    return Report(what=f"failed: {described(error)}", trace=trace, result=result, by_others=by_others)


def start_heartbeat(
    pipe: connection.Connection, progress: Callable[[], int] = lambda: 0, give_up: Callable[[], None] = lambda: None
) -> Callable[[Report], None]:
    """Start a thread that sends heartbeats; if the supervisor dies, the thread kills all ranks, including this one.

    `progress` returns the heartbeat: a number that grows when this rank begins to wait for other ranks. `give_up` is
    called when any rank has failed, died or hung; it lets the waits of this rank fail. The function that is returned
    sends a report to the supervisor.
    """
    sending = threading.Lock()

    def send(message: Report | int) -> None:
        with sending, suppress(ConnectionError):
            pipe.send(message)

    def send_heartbeats() -> None:
        pids: list[int] = []
        try:
            while True:
                if not pipe.poll(HEARTBEAT_SECONDS):
                    send(progress())
                elif (message := pipe.recv()) == GIVE_UP:
                    give_up()
                else:
                    pids = message
        except (EOFError, OSError):
            for pid in pids:
                if pid != os.getpid():
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            os._exit(1)

    threading.Thread(target=send_heartbeats, daemon=True).start()
    return send


class Supervisor(AbstractContextManager):
    """A context manager that starts and watches the processes of a run's ranks, and kills them when the context ends.

    Args:
        work: main function of a rank; its first argument is the rank's pipe (see `start_heartbeat`).
        arguments: for each rank, the other arguments of `work`.
        timeout: seconds after which a rank hangs: if it sends no heartbeat, or if others wait for it and no rank makes
            progress. Time in which this process was suspended (Ctrl-Z) does not count.
    """

    def __init__(self, work: Callable[..., None], arguments: Sequence[tuple], timeout: float):
        context = multiprocessing.get_context("forkserver")
        self.timeout = timeout
        self.processes: list[Any] = []
        self.pipes: list[connection.Connection] = []
        self.reports: list[Report | None] = [None] * len(arguments)
        self.silence = [-START_SECONDS] * len(arguments)
        self.progress: defaultdict[int, int] = defaultdict(int)  # by rank
        self.stalled, self.began = 0.0, time.monotonic()
        try:
            for rank, of_rank in enumerate(arguments):
                ours, theirs = context.Pipe()
                self.pipes.append(ours)
                with theirs:
                    process = context.Process(target=work, args=(theirs, *of_rank), name=f"rank {rank}")
                    with without_main_module():
                        process.start()
                self.processes.append(process)
            pids = [process.pid for process in self.processes]
            log.debug("the ranks' processes: %s", " ".join(map(str, pids)))
            self._tell(pids)
        except BaseException:
            self.__exit__()
            raise

    def wait(self, stop: StopRequest) -> list[Any]:
        """Wait for all ranks, and return their return values, in the order of the ranks.

        After a stop signal, SIGUSR1 is sent once to all ranks, which finish their step, save a checkpoint and end.

        Raises:
            ConfigError: if a rank raised a ConfigError.
            RankError: if a rank failed, died or hung; the error names the first such rank.
        """
        passed_on = False
        while any(report is None for report in self.reports):
            self._read_pipes()
            if stop.received and not passed_on:
                passed_on = True
                self._signal(signal.SIGUSR1)
            if self._broken():
                raise self._first_error()
        for process in self.processes:
            process.join(GRACE_SECONDS)
        return [report.value for report in self.reports if report]

    def __exit__(self, *_: object) -> None:
        self._signal(signal.SIGKILL)
        for process in self.processes:
            process.join()
            process.close()
        for pipe in self.pipes:
            pipe.close()
        self.processes, self.pipes = [], []

    def _read_pipes(self) -> None:
        """Read the pipes of all ranks, waiting for at most 0.2 s."""
        since = time.monotonic()
        open_pipes = {pipe: rank for rank, pipe in enumerate(self.pipes) if self.reports[rank] is None}
        ready = connection.wait([*open_pipes, *(self.processes[rank].sentinel for rank in open_pipes.values())], 0.2)
        passed = min(time.monotonic() - since, 0.5)  # capped: this process may have been suspended
        self.stalled += passed
        for pipe, rank in open_pipes.items():
            self.silence[rank] += passed
            if pipe in ready:
                self._read_pipe(rank)

    def _read_pipe(self, rank: int) -> None:
        with suppress(EOFError, OSError):
            while self.reports[rank] is None and self.pipes[rank].poll():
                message = self.pipes[rank].recv()
                self.silence[rank] = 0.0
                if isinstance(message, Report):
                    self.reports[rank], self.stalled = message, 0.0
                elif message != self.progress[rank]:
                    self.progress[rank], self.stalled = message, 0.0

    def _broken(self) -> bool:
        failed = any(report and not report.succeeded for report in self.reports)
        return failed or bool(self._dead()) or max(self.silence) > self.timeout or self._has_stalled()

    def _has_stalled(self) -> bool:
        """Return whether some ranks wait for others, and no rank has made progress within the timeout."""
        running = {self.progress[rank] for rank, report in enumerate(self.reports) if report is None}
        return self.stalled > self.timeout and len(running) > 1

    def _dead(self) -> list[int]:
        ended = [rank for rank, process in enumerate(self.processes) if not process.is_alive()]
        for rank in ended:
            self._read_pipe(rank)  # its report may have arrived since
        return [rank for rank in ended if self.reports[rank] is None]

    def _first_error(self) -> Exception:
        """Return the error to raise after a rank has failed, died or hung, once all had time to report."""
        silent = [rank for rank, seconds in enumerate(self.silence) if seconds > self.timeout]
        self._tell(GIVE_UP)
        until = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < until and any(
            report is None and process.is_alive() for report, process in zip(self.reports, self.processes, strict=True)
        ):
            self._read_pipes()
        reports = {rank: report for rank, report in enumerate(self.reports) if report and not report.succeeded}
        refusals = [report.refused for report in reports.values() if report.refused is not None]
        if refusals:
            return refusals[0]
        return RankError(*self._first(silent, reports), result=self.reports[0].result if self.reports[0] else None)

    def _first(self, silent: list[int], reports: dict[int, Report]) -> tuple[int, str, str]:
        """Return (rank, what, trace) for the rank that seems to have failed first."""
        dead = {rank: self._exit_reason(rank) for rank in self._dead()}
        late = [rank for rank, report in enumerate(self.reports) if report is None and rank not in dead]
        late.sort(key=lambda rank: self.progress[rank])
        hangs = "did not reach the collective that the others waited in: it is stopped, or hangs "
        hangs += f"(parallel.timeout={self.timeout:g})"
        # Those that may only have waited for another rank come last, and among failures, the later ones.
        found = [(3 if waited else 0, 0.0, rank, what, "") for rank, (what, waited) in dead.items()]
        found += [
            (4 if each.by_others else 1, each.time, rank, each.what, each.trace) for rank, each in reports.items()
        ]
        found += [(2, place, rank, hangs, "") for place, rank in enumerate((*silent, *late))]
        return min(found)[2:]

    def _exit_reason(self, rank: int) -> tuple[str, bool]:
        """Return how the process of `rank` ended without a report, and whether another rank may be the cause."""
        code = self.processes[rank].exitcode
        if code >= 0:
            hint = " (or the fork server, which starts the ranks, was killed)" if code == _UNKNOWN_EXIT else ""
            return f"exited with code {code}{hint}", False
        name = signal.Signals(-code).name
        hint = " (the kernel does that where memory runs out)" if name == "SIGKILL" else ""
        # NCCL's watchdog aborts a process that has waited for the timeout, or in which an operation has failed.
        waited = name == "SIGABRT" and time.monotonic() - self.began > self.timeout
        if waited:
            hint = " (on CUDA, NCCL does that if a collective times out: see nccl_rank_* of the run directory)"
        return f"was killed by {name}{hint}", waited

    def _tell(self, message: Any) -> None:
        for pipe in self.pipes:
            with suppress(OSError):  # the rank has already ended, which `wait` will detect
                pipe.send(message)

    def _signal(self, number: signal.Signals) -> None:
        for process in self.processes:
            if process.is_alive():
                with suppress(ProcessLookupError):
                    os.kill(process.pid, number)
