"""Data loading in worker processes: DataLoader with a watchdog.

Workers are forked from the fork server. Starting a worker takes 0.1 s, and a worker takes 17 MB of memory.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import threading
from collections.abc import Generator, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from runner.data.worker_watchdog import Watch
from runner.system.cpu import cores_per_process
from runner.system.forkserver import METHOD, start_server, without_main_module


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
            DataError: if a worker died, or no batch arrived in time.
            Exception: any exception that `fetch` raises.
        """
        self.reading, self._jobs.jobs, batches = True, jobs, None
        try:
            watch, batches = self._begin()
            with suppress(StopIteration):
                while True:
                    yield watch.wait_for(partial(next, batches))
        except BaseException:
            del batches  # the last reference but one: without any, DataLoader lets each worker finish its batch
            self.close()
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
            collate_fn=_unchanged,
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


def _unchanged(batch: Any) -> Any:
    return batch
