"""Data loading in worker processes, which are forked from the fork server: each takes 0.1 s and 17 MB of memory."""

from __future__ import annotations

import multiprocessing.connection
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import torch

from runner.config import packed_code
from runner.config.errors import ConfigError
from runner.data.base import DataError
from runner.system.cpu import cores_per_process
from runner.system.forkserver import start_server, without_main_module
from runner.system.torch_errors import is_out_of_shared_memory
from runner.system.trees import holds_objects, map_leaves, map_tensors, tensors_of

_POLL, _SECONDS_TO_END = 0.5, 1.0
_SMALL_BYTES = 1 << 18
_REMEDY = (
    "if memory ran out, reduce data.workers or data.prefetch, or enlarge /dev/shm (docker run --shm-size=8g); "
    "data.workers=0 loads data in the main process"
)

J = TypeVar("J")
T = TypeVar("T")


class Workers:
    """Processes that load batches, for several iterations at once. They start in the first one, and end in `close`.

    Args:
        count: number of processes; with none, the process that reads loads the batches.
        timeout: seconds to wait for a batch.
        ahead: number of batches that each process loads in advance.
        functions: functions of the user that load batches. Each process gets them once, as they are now, before they
            have opened a file, for example; see `call_shared`.

    Raises:
        ConfigError: if the functions cannot be sent to a process.
    """

    def __init__(self, count: int, timeout: float = 120, ahead: int = 2, functions: Sequence[Callable] | None = None):
        self.count, self.timeout, self.ahead = count, timeout, ahead
        try:
            self._packed = packed_code.pack(functions) if count and functions else b""
        except ConfigError as error:
            remedy = "open files, and make what cannot be sent, in the first __getitem__; or data.workers=0"
            raise ConfigError("workers", count, error.why, remedy) from error
        self.attributes: dict[str, Any] = {}
        """Those that the functions have in each process, as far as they are only known later."""
        self._pool: ProcessPoolExecutor | None = None
        self._loading: list[Future[Any]] = []

    def map(self, load: Callable[[J], T], jobs: Iterable[J]) -> Generator[T]:
        """Yield `load(job)` for every job, in their order; tensors that are not small are sent through shared memory.

        Raises `DataError` if a worker died, no batch arrived in time, or there is too little shared memory; and
        whatever `load` raises.
        """
        if self.count == 0:
            yield from map(load, jobs)
            return
        remaining = iter(jobs)
        loading = deque(self._begin(load, job) for job in islice(remaining, self.count * self.ahead))
        while loading:  # an iteration that is not completed leaves a few: `close` cannot end a pool with cancelled ones
            batch = self._result(loading.popleft())
            loading.extend(self._begin(load, job) for job in islice(remaining, 1))
            yield batch

    def close(self) -> None:
        """End the processes; the next `map` starts new ones."""
        if self._pool is not None:
            pool, self._pool = self._pool, None
            wait(self._loading, _SECONDS_TO_END)  # killed while it sends a batch, a worker may leave it in /dev/shm
            for worker in _processes(pool):  # SIGTERM would not end one that is suspended or blocked in a read
                worker.kill()
            pool.shutdown()

    def _begin(self, load: Callable[[J], T], job: J) -> Future[T]:
        try:
            if self._pool is None:
                start_worker_server()
                context = multiprocessing.get_context("forkserver")
                self._pool = ProcessPoolExecutor(self.count, context, _begin_worker, (self._packed, self.attributes))
            with without_main_module():  # a worker may be started here
                future = self._pool.submit(_loaded, load, job)
            self._loading = [*(each for each in self._loading if not each.done()), future]
            return future
        except BrokenProcessPool as error:
            raise self._death(error) from None
        except OSError as error:  # raised by the semaphores in shared memory
            raise DataError("/dev/shm", f"data workers cannot be started: {error}", _REMEDY) from None

    def _result(self, future: Future[T]) -> T:
        # Count polls instead of reading a clock: time during which the run itself was stopped (Ctrl-Z) does not count.
        waited = 0.0
        while not wait([future], _POLL).done:
            waited += _POLL
            if waited >= self.timeout:
                pids = ", ".join(str(worker.pid) for worker in _processes(self._pool))
                self.close()
                why = f"no batch arrived within {self.timeout:g} s: a worker is stopped, or its disk does not respond"
                remedy = "increase data.timeout if reading a batch takes that long"
                raise DataError(f"data workers {pids}", why, remedy)
        try:
            return map_leaves(lambda leaf: leaf.tensor() if isinstance(leaf, _Small) else leaf, future.result())
        except BrokenProcessPool as error:
            raise self._death(error) from None
        except RuntimeError as error:
            if not is_out_of_shared_memory(error):
                raise
            raise DataError("/dev/shm", "it has no room for a batch", _REMEDY) from None

    def _death(self, error: BrokenProcessPool) -> Exception:
        """End all workers, and return a `DataError` about the one that has died; `error` itself if none has."""
        workers = _processes(self._pool)
        ended = multiprocessing.connection.wait([worker.sentinel for worker in workers], 2)
        self.close()
        for worker in workers:
            if worker.sentinel in ended:
                code = worker.exitcode or 0
                end = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
                return DataError(f"data worker {worker.pid}", f"it {end}", _REMEDY)
        return error


def _processes(pool: Any) -> list[Any]:
    """Return the processes of `pool`; from Python 3.14 on, its method `kill_workers` ends them."""
    return [] if pool is None else [*pool._processes.values()]


def start_worker_server() -> None:
    """Start the fork server of the workers in the background, unless a fork server is running."""
    start_server("torch", "PIL.Image", "runner.data.image_files")


class _Small:
    """A tensor that is sent through a pipe: for one of a few kilobytes, shared memory takes ten times as long."""

    def __init__(self, values: np.ndarray, strides: tuple[int, ...]):
        self.values, self.strides = values, strides

    def tensor(self) -> torch.Tensor:
        values = torch.from_numpy(self.values)
        # A copy, with the alignment of all tensors, on which last bits may depend, and the strides that it had.
        return torch.empty_strided(values.shape, self.strides, dtype=values.dtype).copy_(values)


def _loaded(load: Callable[[J], T], job: J) -> Any:
    loaded = load(job)
    is_large = sum(each.nbytes for each in tensors_of(loaded) if each.layout == torch.strided) > _SMALL_BYTES
    return loaded if is_large or holds_objects(loaded) else map_tensors(_as_small, loaded)


def _as_small(tensor: torch.Tensor) -> Any:
    if type(tensor) is torch.Tensor and tensor.layout == torch.strided and tensor.is_contiguous():
        with suppress(TypeError, RuntimeError):  # of a type or a kind that NumPy does not have
            return _Small(tensor.numpy(), tensor.stride())
    return tensor


def default_count() -> int:
    """Return the default number of workers per rank, at most 16: its share of the CPU cores minus one.

    Without an accelerator, about a quarter of the share: a network on a CPU takes much longer than decoding its inputs.
    """
    cores = cores_per_process()
    return min(16, cores - 1 if torch.accelerator.is_available() else (cores + 2) // 4, cores - 1)


_functions: Sequence[Callable[[Any], Any]] = ()


def call_shared(number: int, job: Any) -> Any:
    """Call, in a worker, the function with this number among the `functions` of its `Workers`."""
    return _functions[number](job)


def _begin_worker(packed: bytes, attributes: dict[str, Any]) -> None:
    """Use one thread, and exit when the process of the run ends, even by SIGKILL: then nobody closes the queues."""
    global _functions
    torch.set_num_threads(1)
    _functions = packed_code.unpack(packed) if packed else ()
    for function in _functions:
        vars(function).update(attributes)
    run = multiprocessing.parent_process()
    assert run is not None

    def exit_with_parent() -> None:
        run.join()
        os._exit(1)

    threading.Thread(target=exit_with_parent, daemon=True).start()
