"""Data loading in worker processes: DataLoader with a watchdog.

Workers are forked from the fork server. Each evaluation starts new workers; starting a worker takes 0.1 s, and a worker
takes 17 MB of memory.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import threading
from collections.abc import Generator, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from runner.data.worker_watchdog import POLL, Watch
from runner.system.cpu import cores_per_process
from runner.system.forkserver import METHOD, start_server, without_main_module


class Fetch(Protocol):
    """A loader of batches: `fetch[job]` loads and returns the batch that `job` describes.

    The loader is sent to each worker once; the workers then use it to load batches.
    """

    def __getitem__(self, job: Any, /) -> Any: ...


@dataclass(frozen=True)
class Workers:
    """The settings of the worker processes of one rank; `read` starts the workers.

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

    def read(self, fetch: Fetch, jobs: Iterable[Any]) -> Generator[Any]:
        """Yield `fetch[job]` for every job, always in the order of the jobs.

        Raises:
            DataError: if a worker died, or no batch arrived in time.
            Exception: any exception that `fetch` raises.
        """
        options: dict[str, Any] = {}
        if self.count > 0:
            start_server("torch", "PIL.Image", "runner.data.image_files")
            options = {"timeout": POLL, "prefetch_factor": self.ahead, "multiprocessing_context": METHOD}
        loader = torch.utils.data.DataLoader(
            fetch,  # pyright: ignore[reportArgumentType]  # only __getitem__ is used
            batch_size=None,  # a job is already a whole batch
            sampler=jobs,
            collate_fn=_unchanged,
            num_workers=self.count,  # DataLoader sets each worker to one thread
            worker_init_fn=_exit_with_parent,
            pin_memory=self.pin_memory,
            generator=torch.Generator(),  # the default would consume random numbers of the global generator
            **options,
        )
        before = set(multiprocessing.active_children())
        with without_main_module():
            batches = iter(loader)
        watch = Watch(set(multiprocessing.active_children()) - before, self.timeout)
        atexit.register(watch.kill)  # runs before the exit handler of multiprocessing, which would join the workers
        try:
            with suppress(StopIteration):
                while True:
                    yield watch.next(batches)
        finally:
            watch.end()
            del batches  # shuts the workers down, each after its current batch
            watch.kill()
            atexit.unregister(watch.kill)


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
