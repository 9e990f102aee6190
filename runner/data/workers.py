"""Data loading in worker processes: DataLoader with a watchdog.

Workers are forked from the fork server. Starting a worker takes 0.1 s, and a worker takes 17 MB of memory.
"""

from __future__ import annotations

import atexit
import multiprocessing.connection
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Any, Protocol, TypeVar

import torch

from runner.data.base import DataError
from runner.system.cpu import cores_per_process
from runner.system.forkserver import METHOD, start_server, without_main_module

POLL = 0.5
"""Seconds between two checks of whether the workers hang."""

_SHARED_MEMORY = "/dev/shm"
_IN_MAIN_PROCESS = "data.workers=0 loads data in the main process"
_ENLARGE = f"reduce data.workers or data.prefetch, or enlarge it (docker run --shm-size=8g); {_IN_MAIN_PROCESS}"
_CAUSES = {
    signal.SIGKILL: (", perhaps because memory ran out", "reduce data.workers or data.prefetch; "),
    signal.SIGBUS: (", most likely because shared memory ran out", "enlarge /dev/shm (docker run --shm-size=8g); "),
}
"""(likely cause, remedy) by the signal that killed a worker."""

T = TypeVar("T")


class Fetch(Protocol):
    """A loader of batches, which is sent to each worker once: `fetch[job]` loads and returns the batch of `job`."""

    def __getitem__(self, job: Any, /) -> Any: ...


@dataclass(frozen=True)
class Workers:
    """The worker processes of one rank: number, seconds to wait for a batch, and batches that each loads ahead."""

    count: int
    timeout: float = 120
    ahead: int = 2
    pin_memory: bool = False


class Loader:
    """A loader of batches in worker processes. They start in the first `read`, wait between two, and end in `close`.

    DataLoader's timeout covers only the wait for the message that a batch is ready. It then requests the file
    descriptor of the batch's shared memory, which blocks forever if the worker is suspended (SIGSTOP). A thread kills
    the workers if this takes too long. Without a timeout, DataLoader checks every five seconds whether a worker has
    died.
    """

    def __init__(self, fetch: Fetch, workers: Workers):
        self.fetch, self.workers, self.timeout = fetch, workers, workers.timeout
        self.reading = False
        """Whether a `read` has begun and not ended; there may be only one at a time."""
        self._jobs = _Jobs()
        self._loader: torch.utils.data.DataLoader[Any] | None = None
        self._processes: set[BaseProcess] = set()
        self._closed = threading.Event()
        self._waiting, self._received = False, 0
        self._problem: DataError | None = None

    def read(self, jobs: Iterable[Any]) -> Generator[Any]:
        """Yield `fetch[job]` for every job, in their order. The workers end with an iteration that is not completed.

        Raises `DataError` if a worker died, no batch arrived in time, or there is too little shared memory; and
        whatever `fetch` raises.
        """
        self.reading, self._jobs.jobs, batches = True, jobs, None
        try:
            batches = self._begin() if self._loader is None else self._wait_for(partial(iter, self._loader))
            with suppress(StopIteration):
                while True:
                    yield self._wait_for(partial(next, batches))
        except BaseException as error:
            del batches  # the last reference but one: without any, DataLoader lets each worker finish its batch
            self.close()
            if isinstance(error, SharedMemoryError):
                raise DataError(_SHARED_MEMORY, "it has no room for a batch", _ENLARGE) from None
            raise
        finally:
            self.reading = False

    def close(self) -> None:
        self._loader = None
        self._closed.set()
        self._kill()
        atexit.unregister(self._kill)

    def _begin(self) -> Iterator[Any]:
        options: dict[str, Any] = {}
        if self.workers.count > 0:
            if sys.platform == "linux" and not os.access(_SHARED_MEMORY, os.W_OK):
                why = "data workers send batches through it, and it is missing or read-only"
                raise DataError(_SHARED_MEMORY, why, _ENLARGE)
            start_worker_server()
            options = {"prefetch_factor": self.workers.ahead, "multiprocessing_context": METHOD}
        self._loader = torch.utils.data.DataLoader(
            self.fetch,  # pyright: ignore[reportArgumentType]  # only __getitem__ is used
            batch_size=None,  # a job is already a whole batch
            sampler=self._jobs,
            collate_fn=_shared,
            num_workers=self.workers.count,  # DataLoader sets each worker to one thread
            worker_init_fn=_exit_with_parent,
            pin_memory=self.workers.pin_memory,
            generator=torch.Generator(),  # the default would consume random numbers of the global generator
            persistent_workers=self.workers.count > 0,
            **options,
        )
        before = set(multiprocessing.active_children())
        with without_main_module():
            batches = iter(self._loader)
        self._processes, self._problem = set(multiprocessing.active_children()) - before, None
        atexit.register(self._kill)  # before the exit handler of multiprocessing, which would join the workers
        if self._processes:
            self._closed = threading.Event()
            threading.Thread(target=self._watch, args=(self._closed,), daemon=True).start()
        return batches

    def _wait_for(self, receive: Callable[[], T]) -> T:
        self._waiting = True
        try:
            return receive()
        except StopIteration:
            raise
        except Exception as error:
            # The connection to a worker breaks shortly before its exit code is available.
            problem = self._problem or self._death(2 if isinstance(error, OSError | EOFError) else 0)
            if problem is None:
                raise
            raise problem from None
        finally:
            self._waiting, self._received = False, self._received + 1

    def _watch(self, closed: threading.Event) -> None:
        # Count polls instead of reading a clock: time during which the run itself was stopped (Ctrl-Z) does not count.
        waited, seen = 0.0, 0
        while not closed.wait(POLL):
            waited = waited + POLL if self._waiting and self._received == seen else 0.0
            seen = self._received
            if waited >= self.timeout:
                pids = ", ".join(str(worker.pid) for worker in self._processes)
                why = f"no batch arrived within {self.timeout:g} s: a worker is stopped, or its disk does not respond"
                remedy = "increase data.timeout if reading a batch takes that long"
                self._problem = self._death(0) or DataError(f"data workers {pids}", why, remedy)
                for worker in self._processes:
                    worker.kill()
                return

    def _kill(self) -> None:
        for worker in self._processes:  # SIGTERM would not end one that is suspended or blocked in a read
            if worker.is_alive():
                worker.kill()
                worker.join()

    def _death(self, grace_period: float) -> DataError | None:
        """Return the error of a worker that has died or dies within `grace_period` seconds; None if all are alive."""
        multiprocessing.connection.wait([worker.sentinel for worker in self._processes], grace_period)
        for worker in self._processes:
            if not worker.is_alive():
                code = worker.exitcode or 0
                end = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
                cause, remedy = _CAUSES.get(signal.Signals(-code), ("", "")) if code < 0 else ("", "")
                return DataError(f"data worker {worker.pid}", f"it {end}{cause}", f"{remedy}{_IN_MAIN_PROCESS}")
        return None


class _Jobs:
    """The sampler of a DataLoader whose iterations have different samples."""

    jobs: Iterable[Any] = ()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.jobs)


class Loaders:
    """The loaders of a data set: one for training and one for evaluations, for example."""

    def __init__(self) -> None:
        self._loaders: list[Loader] = []

    def read(self, fetch: Fetch, workers: Workers, jobs: Iterable[Any]) -> Generator[Any]:
        """Yield what `Loader.read` yields; the loader is one of an earlier call with equal arguments, if it is idle."""
        idle = (each for each in self._loaders if not each.reading and (each.fetch, each.workers) == (fetch, workers))
        loader = next(idle, None)
        if loader is None:
            loader = Loader(fetch, workers)
            self._loaders.append(loader)
        try:
            yield from loader.read(jobs)
        except BaseException:  # its workers have ended
            with suppress(ValueError):
                self._loaders.remove(loader)
            raise

    def close(self) -> None:
        while self._loaders:
            self._loaders.pop().close()


def start_worker_server() -> None:
    """Start the fork server of the workers in the background, unless a fork server is running."""
    start_server("torch", "PIL.Image", "runner.data.image_files")


def default_count() -> int:
    """Return the default number of workers per rank, at most eight: its share of the CPU cores minus one.

    Without an accelerator, about a quarter of the share: a network on a CPU takes much longer than decoding its inputs.
    """
    cores = cores_per_process()
    accelerated = torch.cuda.is_available() or torch.backends.mps.is_available()
    return min(8, cores - 1 if accelerated else (cores + 2) // 4, cores - 1)


def _exit_with_parent(_: int) -> None:
    """Make the worker exit when the process of the run ends, even by SIGKILL: DataLoader watches the fork server."""
    run = multiprocessing.parent_process()
    assert run is not None

    def wait() -> None:
        run.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


class SharedMemoryError(RuntimeError):
    pass


def _shared(batch: Any) -> Any:
    """Move the tensors of a batch to shared memory in a worker: in DataLoader's thread, an error is only printed."""
    if torch.utils.data.get_worker_info() is not None:
        try:
            for each in batch if isinstance(batch, tuple) else (batch,):
                if isinstance(each, torch.Tensor):
                    each.share_memory_()
        except RuntimeError as error:
            raise SharedMemoryError(str(error)) from None
    return batch
