"""Worker processes that read samples ahead of the training: torch's DataLoader, and a good end to whatever may happen.

Workers are forked from the fork server, at every evaluation too: one takes a tenth of a second, and 17 MB.
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

from runner.data.watch import POLL, Watch
from runner.system.cpu import allowed_cores
from runner.system.forkserver import METHOD, start_server


class Fetch(Protocol):
    """Makes a batch of a job; is sent to the workers once, and called there."""

    def __getitem__(self, job: Any, /) -> Any: ...


@dataclass(frozen=True)
class Workers:
    """How batches are read beside the training.

    Args:
        count: processes; 0 reads in this process.
        timeout: seconds without a batch after which the run ends with an error.
        ahead: batches that each worker reads ahead.
        pin_memory: put batches into page-locked memory, from which they are copied to a CUDA device while it computes.
    """

    count: int
    timeout: float = 120
    ahead: int = 2
    pin_memory: bool = False

    def read(self, fetch: Fetch, jobs: Iterable[Any]) -> Generator[Any]:
        """`fetch[job]` of every job, in order, whatever the number of workers.

        Raises:
            DataError: when a worker died, or none has brought a batch in time.
        """
        options: dict[str, Any] = {}
        if self.count > 0:
            start_server("torch", "PIL.Image", "runner.data.files")
            options = {"timeout": POLL, "prefetch_factor": self.ahead, "multiprocessing_context": METHOD}
        loader = torch.utils.data.DataLoader(
            fetch,  # pyright: ignore[reportArgumentType]  # all it has to have is __getitem__
            batch_size=None,  # a job is a whole batch already
            sampler=jobs,
            collate_fn=_as_it_is,
            num_workers=self.count,  # each sets its threads to one by itself
            worker_init_fn=_end_with_the_run,
            pin_memory=self.pin_memory,
            generator=torch.Generator(),  # it would draw a seed from the global one, which belongs to the model
            **options,
        )
        others = set(multiprocessing.active_children())
        batches = iter(loader)
        watch = Watch(set(multiprocessing.active_children()) - others, self.timeout)
        atexit.register(watch.kill)  # before multiprocessing's own handler, which would wait for them
        try:
            with suppress(StopIteration):
                while True:
                    yield watch.next(batches)
        finally:
            watch.end()
            del batches  # ends the workers, each after the batch in hand
            watch.kill()
            atexit.unregister(watch.kill)


def default_count() -> int:
    """One worker a core that this process may use, less one for the training, and at most eight."""
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # those of a distributed run share the machine
    return max(0, min(8, allowed_cores() // processes - 1))


def _end_with_the_run(_: int) -> None:
    """In a worker: exit as soon as the run's process does, were it by kill -9.

    DataLoader's own watchdog looks for the parent, which is the fork server; and that one lives as long as its workers.
    """
    run = multiprocessing.parent_process()
    assert run is not None

    def watch() -> None:
        run.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _as_it_is(batch: Any) -> Any:
    return batch
