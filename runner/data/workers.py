"""Data loading in worker processes: DataLoader with a watchdog.

Workers are forked from the fork server. Starting a worker takes 0.1 s, and a worker takes 17 MB of memory.
"""

from __future__ import annotations

import atexit
import math
import multiprocessing
import os
import sys
import threading
from collections.abc import Generator, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from runner.data.base import DataError
from runner.data.worker_watchdog import Watch
from runner.system.cpu import cores_per_process, local_world_size
from runner.system.forkserver import METHOD, start_server, without_main_module

_SHARED_MEMORY = "/dev/shm"
_REMEDY = "enlarge it (docker run --shm-size={gigabytes}g); data.workers=0 loads data in the main process"


class Fetch(Protocol):
    """A loader of batches: `fetch[job]` loads and returns the batch that `job` describes.

    The loader is sent to each worker once; the workers then use it to load batches.
    """

    def __getitem__(self, job: Any, /) -> Any: ...


@dataclass(frozen=True)
class Workers:
    """The settings of the worker processes of one rank.

    Args:
        count: number of worker processes of this rank; 0 to load batches in this process.
        timeout: number of seconds to wait for a batch before the run ends with an error.
        ahead: number of batches that each worker loads in advance.
        pin_memory: whether to load batches into page-locked memory, from which copies to CUDA devices are asynchronous.
    """

    count: int
    timeout: float = 120
    ahead: int = 2
    pin_memory: bool = False


class Loader:
    """A loader of batches in worker processes. They start in the first `read`, wait between two, and end in `close`.

    Args:
        fetch: what loads a batch, in the workers.
        workers: the settings of the workers.
    """

    def __init__(self, fetch: Fetch, workers: Workers):
        self.fetch, self.workers = fetch, workers
        self.reading = False
        """Whether a `read` has begun and not ended; there may be only one at a time."""
        self._jobs = _Jobs()
        self._loader: torch.utils.data.DataLoader[Any] | None = None
        self._watch: Watch | None = None

    def read(self, jobs: Iterable[Any]) -> Generator[Any]:
        """Yield `fetch[job]` for every job, always in the order of the jobs.

        The workers end with an iteration that is not completed.

        Raises:
            DataError: if a worker died, no batch arrived in time, or there is too little shared memory.
            Exception: any exception that `fetch` raises.
        """
        self.reading, self._jobs.jobs, batches = True, jobs, None
        try:
            free = _free_shared_memory() if self.workers.count else math.inf
            watch, batches = self._begin()
            with suppress(StopIteration):
                first = watch.wait_for(partial(next, batches))
                _check_memory(self._jobs.num_begun, first, free)
                yield first
                while True:
                    yield watch.wait_for(partial(next, batches))
        except BaseException as error:
            del batches  # the last reference but one: without any, DataLoader lets each worker finish its batch
            self.close()
            if isinstance(error, SharedMemoryError):
                raise DataError(_SHARED_MEMORY, "it has no room for a batch", _REMEDY.format(gigabytes=8)) from None
            raise
        finally:
            self.reading = False

    def close(self) -> None:
        """End the workers, each after its current batch."""
        self._loader = None
        if self._watch is not None:
            self._watch.end()
            atexit.unregister(self._watch.kill)
            self._watch = None

    def _begin(self) -> tuple[Watch, Iterator[Any]]:
        """Return the watchdog of the workers, and the iterator over `fetch[job]` for the current jobs."""
        if self._watch is not None and self._loader is not None:
            return self._watch, self._watch.wait_for(partial(iter, self._loader))
        options: dict[str, Any] = {}
        if self.workers.count > 0:
            start_worker_server()
            options = {
                "prefetch_factor": self.workers.ahead,
                "multiprocessing_context": METHOD,
                "persistent_workers": True,
            }
        self._loader = torch.utils.data.DataLoader(
            self.fetch,  # pyright: ignore[reportArgumentType]  # only __getitem__ is used
            batch_size=None,  # a job is already a whole batch
            sampler=self._jobs,
            collate_fn=_shared,
            num_workers=self.workers.count,  # DataLoader sets each worker to one thread
            worker_init_fn=_exit_with_parent,
            pin_memory=self.workers.pin_memory,
            generator=torch.Generator(),  # the default would consume random numbers of the global generator
            **options,
        )
        before = set(multiprocessing.active_children())
        with without_main_module():
            batches = iter(self._loader)
        self._watch = Watch(set(multiprocessing.active_children()) - before, self.workers.timeout)
        atexit.register(self._watch.kill)  # before the exit handler of multiprocessing, which would join the workers
        return self._watch, batches


class _Jobs:
    """The sampler of a DataLoader whose iterations have different samples."""

    jobs: Iterable[Any] = ()
    num_begun = 0
    """The number of jobs of the current iteration that the workers have been given."""

    def __iter__(self) -> Iterator[Any]:
        self.num_begun = 0
        for job in self.jobs:
            self.num_begun += 1
            yield job


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
        """End all workers, including those that are in use."""
        while self._loaders:
            self._loaders.pop().close()


def start_worker_server() -> None:
    """Start the fork server of the workers in the background, unless a fork server is running."""
    start_server("torch", "PIL.Image", "runner.data.image_files")


def default_count() -> int:
    """Return the default number of workers per rank.

    If there is an accelerator, the number is the rank's share of the CPU cores minus one, but at most eight. Otherwise,
    the number is about a quarter of the share, at most eight, and less than the share: a network on a CPU takes much
    longer than decoding its inputs.
    """
    cores = cores_per_process()
    accelerated = torch.cuda.is_available() or torch.backends.mps.is_available()
    return min(8, cores - 1 if accelerated else (cores + 2) // 4, cores - 1)


def _exit_with_parent(_: int) -> None:
    """Make the worker exit when the process of the run ends, even if that process is killed with SIGKILL.

    DataLoader's own watchdog does not help: it checks the worker's parent process, which is the fork server, and the
    fork server outlives the run.
    """
    run = multiprocessing.parent_process()
    assert run is not None

    def wait() -> None:
        run.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


class SharedMemoryError(RuntimeError):
    """Raised in a worker if there is no shared memory for a batch."""


def _shared(batch: Any) -> Any:
    """Move the tensors of a batch to shared memory if this process is a worker.

    DataLoader would do this in a thread, in which an error is only printed, and the batch would be waited for.
    """
    if torch.utils.data.get_worker_info() is not None:
        try:
            for tensor in _tensors(batch):
                tensor.share_memory_()
        except RuntimeError as error:
            raise SharedMemoryError(str(error)) from None
    return batch


def _tensors(batch: Any) -> list[torch.Tensor]:
    return [each for each in (batch if isinstance(batch, tuple) else (batch,)) if isinstance(each, torch.Tensor)]


def _free_shared_memory() -> float:
    """Return the number of bytes in shared memory that are free for this rank; infinite if there is no limit.

    Raises:
        DataError: if the workers could not send batches, because there is no shared memory.
    """
    if sys.platform != "linux":
        return math.inf
    if not os.access(_SHARED_MEMORY, os.W_OK):
        why = "data workers send batches through it, and it is missing or read-only"
        raise DataError(_SHARED_MEMORY, why, _REMEDY.format(gigabytes=8))
    found = os.statvfs(_SHARED_MEMORY)
    blocks = min(found.f_bavail, found.f_blocks // local_world_size())
    return blocks * found.f_frsize if found.f_blocks else math.inf


def _check_memory(count: int, batch: Any, free: float) -> None:
    """Check that `count` batches of the size of `batch`, which are loaded in advance, fit into `free` bytes.

    Raises:
        DataError: if they do not. The run would end as soon as batches are loaded faster than they are used.
    """
    needed = count * sum(tensor.nbytes for tensor in _tensors(batch))
    if needed > free:
        why = (
            f"{count} batches are loaded in advance and take {needed / 1e6:,.1f} MB, and {free / 1e6:,.1f} MB are free"
        )
        gigabytes = math.ceil(2 * needed * local_world_size() / 2**30)
        remedy = f"reduce data.workers or data.prefetch; {_REMEDY.format(gigabytes=gigabytes)}"
        raise DataError(_SHARED_MEMORY, why, remedy)
