"""A watchdog for data loading workers: if a worker dies or hangs, the run ends with an error."""

from __future__ import annotations

import multiprocessing.connection
import signal
import threading
from collections.abc import Callable, Collection
from multiprocessing.process import BaseProcess
from typing import TypeVar

from runner.data.base import DataError

POLL = 0.5
"""Seconds between two checks of whether the workers hang."""

T = TypeVar("T")

_CAUSES = {
    9: (", perhaps because memory ran out", "reduce data.workers or data.prefetch; "),
    7: (", most likely because shared memory ran out", "enlarge /dev/shm (docker run --shm-size=8g); "),
}
"""(likely cause, remedy) by the number of the signal that killed a worker: 9 is SIGKILL, 7 is SIGBUS."""


class Watch:
    """A watchdog for waiting for DataLoader workers, which kills the workers if this takes too long.

    The timeout of DataLoader is not enough: it covers only the wait for the message that a batch is ready. DataLoader
    then requests the file descriptor of the batch's shared memory over a connection without a timeout, and this request
    blocks forever if the worker is suspended (SIGSTOP). Killing the worker closes the connection and ends the request.
    Without a timeout, DataLoader checks every five seconds whether a worker has died.

    Args:
        workers: the worker processes; empty if the main process loads the data.
        timeout: number of seconds to wait before the workers are killed.
    """

    def __init__(self, workers: Collection[BaseProcess], timeout: float):
        self.workers, self.timeout = workers, timeout
        self._suspects = workers  # without those that this object kills
        self._waiting, self._received, self._timed_out = False, 0, False
        self._ended = threading.Event()
        if workers:
            threading.Thread(target=self._watch, daemon=True).start()

    def wait_for(self, receive: Callable[[], T]) -> T:
        """Return the result of `receive`, which waits for the workers.

        Raises:
            DataError: if a worker died, or `receive` took longer than `timeout` seconds; in both cases, all workers
                have been killed.
            Exception: any other exception that `receive` raises, such as StopIteration after the last batch.
        """
        self._waiting = True
        try:
            return receive()
        except StopIteration:
            raise
        except Exception as error:
            # The connection to a worker breaks shortly before its exit code is available.
            problem = self._problem(grace_period=2 if isinstance(error, OSError | EOFError) else 0)
            if problem is None:
                raise
            self.kill()
            raise problem from None
        finally:
            self._waiting, self._received = False, self._received + 1

    def end(self) -> None:
        """Stop watching the workers, and end them."""
        self._ended.set()
        self.kill()

    def kill(self) -> None:
        """Kill the workers with SIGKILL; SIGTERM would not end a worker that is suspended or blocked in a read."""
        for worker in self.workers:
            if worker.is_alive():
                worker.kill()
                worker.join()

    def _watch(self) -> None:
        # Count polls instead of reading a clock: time during which the run itself was stopped (Ctrl-Z) does not count.
        waited, seen = 0.0, 0
        while not self._ended.wait(POLL):
            waited = waited + POLL if self._waiting and self._received == seen else 0.0
            seen = self._received
            if waited >= self.timeout:
                ended = multiprocessing.connection.wait([worker.sentinel for worker in self.workers], 0)
                self._timed_out = not ended
                self._suspects = [worker for worker in self.workers if worker.sentinel in ended]
                for worker in self.workers:
                    worker.kill()
                return

    def _problem(self, grace_period: float) -> DataError | None:
        """Return an error if the workers timed out, or if a worker has died or dies within `grace_period` seconds.

        Otherwise, return None.
        """
        if self._timed_out:
            pids = ", ".join(str(worker.pid) for worker in self.workers)
            why = f"no batch arrived within {self.timeout:g} s: a worker is stopped, or its disk does not respond"
            return DataError(f"data workers {pids}", why, "increase data.timeout if reading a batch takes that long")
        multiprocessing.connection.wait([worker.sentinel for worker in self.workers], grace_period)
        return next((_death(worker) for worker in self._suspects if not worker.is_alive()), None)


def _death(worker: BaseProcess) -> DataError:
    code = worker.exitcode or 0
    end = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
    cause, remedy = _CAUSES.get(-code, ("", ""))
    return DataError(
        f"data worker {worker.pid}", f"it {end}{cause}", f"{remedy}data.workers=0 loads data in the main process"
    )
