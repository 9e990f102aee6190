"""Worker processes that die or stop end the run with an error that says so, and soon."""

from __future__ import annotations

import multiprocessing.connection
import signal
import threading
from collections.abc import Collection, Iterator
from multiprocessing.process import BaseProcess
from typing import Any

from runner.data.base import DataError

POLL = 0.5
"""Seconds between two looks at the workers. They are the fork server's children, so no signal tells of their death."""

_CAUSES = {
    9: (", perhaps for want of memory", "fewer data.workers or a smaller data.prefetch take less; "),
    7: (", most likely for want of shared memory", "enlarge /dev/shm (docker run --shm-size=8g); "),
}
"""Why the system kills a worker, by signal (SIGKILL, SIGBUS), and what to do."""


class Watch:
    """Takes batches from workers, and kills workers that keep the run waiting for too long.

    DataLoader's own timeout does not do: it is over when the message has come that a batch is ready; then the batch's
    memory is asked for, over a connection without a timeout, at whose other end the worker may be stopped. Killed, it
    lets go of whatever the run waits for.

    Args:
        workers: the processes; none where the run's own reads.
        timeout: seconds without a batch after which they are killed.
    """

    def __init__(self, workers: Collection[BaseProcess], timeout: float):
        self.workers, self.timeout = workers, timeout
        self._waiting, self._received, self._timed_out = False, 0, False
        self._ended = threading.Event()
        if workers:
            threading.Thread(target=self._look, daemon=True).start()

    def next(self, batches: Iterator[Any]) -> Any:
        """The next of a DataLoader's `batches`, whose own timeout is one poll.

        Raises:
            DataError: when a worker died, or none brought a batch in time.
        """
        self._waiting = True
        try:
            while True:
                try:
                    return next(batches)
                except StopIteration:
                    raise
                except Exception as error:
                    # A worker's connection breaks a little before its exit code is known.
                    problem = self._problem(patience=2 if isinstance(error, OSError | EOFError) else 0)
                    if problem is not None:
                        self.kill()
                        raise problem from None
                    if not str(error).startswith("DataLoader timed out"):
                        raise
        finally:
            self._waiting, self._received = False, self._received + 1

    def end(self) -> None:
        """Look no more."""
        self._ended.set()

    def kill(self) -> None:
        """End workers that may be stopped, or in the middle of a read: SIGTERM would not do."""
        for worker in self.workers:
            if worker.is_alive():
                worker.kill()
                worker.join()

    def _look(self) -> None:
        # Waiting is counted, not timed: a run that was itself stopped, with Ctrl-Z, has not waited.
        waited, seen = 0.0, 0
        while not self._ended.wait(POLL):
            waited = waited + POLL if self._waiting and self._received == seen else 0.0
            seen = self._received
            if waited >= self.timeout:
                self._timed_out = True
                for worker in self.workers:
                    worker.kill()
                return

    def _problem(self, patience: float) -> DataError | None:
        """What is wrong with the workers, or goes wrong within `patience` seconds."""
        if self._timed_out:
            pids = ", ".join(str(worker.pid) for worker in self.workers)
            why = f"no batch came for {self.timeout:g} s: a worker is stopped, or its disk hangs"
            return DataError(f"data workers {pids}", why, "if reading a batch takes that long, raise data.timeout")
        multiprocessing.connection.wait([worker.sentinel for worker in self.workers], patience)
        return next((_death(worker) for worker in self.workers if not worker.is_alive()), None)


def _death(worker: BaseProcess) -> DataError:
    code = worker.exitcode or 0
    ended = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    cause, remedy = _CAUSES.get(-code, ("", ""))
    return DataError(f"data worker {worker.pid}", f"it {ended}{cause}", f"{remedy}data.workers=0 needs no workers")
