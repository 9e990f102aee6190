"""The device of a run, which is chosen automatically or named in the config."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch

from runner.config.errors import ConfigError, check, check_choice, check_range
from runner.system.cpu import cores_per_process, cpu_model, local_world_size, seconds_without_core, usable_core_numbers
from runner.system.memory import freed_memory_kept


@dataclass
class Device:
    """The requested device; `resolve` checks that it is available. The options are documented in conf/device/."""

    kind: str = "auto"
    index: int | None = None
    indices: list[int] = field(default_factory=list)
    threads: int | None = None

    def __post_init__(self) -> None:
        check_choice(self, "kind", ("auto", "cpu", "cuda", "mps"))
        check_range(self, "index", least=0)
        check_range(self, "threads", least=1, most=1024)
        if self.index is not None and self.kind not in ("auto", "cuda"):
            why = f"device={self.kind} has no numbered devices"
            raise ConfigError("index", self.index, why, "leave device.index=null, or choose device=cuda")
        if self.index is not None and self.indices not in ([], [self.index]):
            why = f"device.indices={self.indices} names other devices"
            raise ConfigError("index", self.index, why, "leave one of the two out")
        if len(set(self.indices)) < len(self.indices) or any(index < 0 for index in self.indices):
            why = "they must be distinct and not negative"
            raise ConfigError("indices", self.indices, why, "for example device.indices=[0,1]")

    def resolve(self) -> torch.device:
        """Return the device to compute on.

        Raises:
            ConfigError: if the requested device is not available.
        """
        kind = self.kind
        if kind == "auto":
            kind = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
        if kind == "cuda":
            return self.resolve_all(only_first=True)[0]
        self.check_unnumbered(kind)
        if kind == "mps":
            check(torch.backends.mps.is_available(), "kind", kind, "this machine has no Metal device", _AVAILABLE)
        return torch.device(kind)

    def check_unnumbered(self, kind: str) -> None:
        """Raise a `ConfigError` if a CUDA device is requested by index, for a run on the device `cpu` or `mps`."""
        why = f"the device is the {kind}"
        check(self.index is None, "index", self.index, why, "leave device.index=null")
        check(not self.indices, "indices", self.indices, why, "leave device.indices=[]")

    def resolve_all(self, only_first: bool = False) -> list[torch.device]:
        """Return the CUDA devices to compute on: those that `index` or `indices` selects, or all visible devices.

        Raises:
            ConfigError: if a requested device is not available.
        """
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        of_visible = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible!r})"
        check(torch.cuda.is_available(), "kind", "cuda", f"torch finds no CUDA device{of_visible}", _AVAILABLE)
        count = torch.cuda.device_count()
        key, chosen = ("index", [self.index]) if self.index is not None else ("indices", self.indices or range(count))
        why = f"{count} CUDA devices are visible{of_visible}"
        check(all(index < count for index in chosen), key, getattr(self, key), why, f"choose from 0 to {count - 1}")
        return [torch.device("cuda", index) for index in chosen[: 1 if only_first else None]]

    @contextmanager
    def settings(self, device: torch.device, deterministic: bool, num_data_workers: int = 0) -> Iterator[None]:
        """Set torch's global flags for one run, the current CUDA device among them, and restore them afterwards.

        The environment variable CUBLAS_WORKSPACE_CONFIG is set, and stays set. On a CPU, freed memory is kept in the
        process during the run (see `runner.system.memory`).
        """
        before = torch.get_num_threads(), torch.backends.cudnn.benchmark, torch.are_deterministic_algorithms_enabled()
        if deterministic:
            # https://docs.nvidia.com/cuda/cublas/index.html#results-reproducibility
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.set_num_threads(self.threads or default_threads(device, num_data_workers))
        torch.backends.cudnn.benchmark = device.type == "cuda" and not deterministic
        _use_deterministic(deterministic)
        try:
            # Not `set_device`, which would make a context on the device that it restores.
            current = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
            with current, freed_memory_kept() if device.type == "cpu" else nullcontext():
                yield
        finally:
            torch.set_num_threads(before[0])
            torch.backends.cudnn.benchmark = before[1]
            _use_deterministic(before[2])


_AVAILABLE = "device=auto chooses an available device; `python -m runner doctor` lists them"


def default_threads(device: torch.device, num_data_workers: int) -> int:
    """Return the number of CPU threads that a process uses for an operation if the option `device.threads` is null.

    If `device` is the CPU, one core is reserved for each data worker, but at most half of the process's cores (rounded
    up), unless OMP_NUM_THREADS is set: a thread that has to wait for a core delays the other threads of its operation.
    """
    threads = torch.get_num_threads()
    if device.type != "cpu" or not num_data_workers or "OMP_NUM_THREADS" in os.environ:
        return threads
    cores = cores_per_process()
    return max(1, min(threads, max(cores - num_data_workers, cores // 2)))


def oversubscription(device: torch.device, num_data_workers: int) -> str:
    """Return a warning if the run has more busy threads on this machine than there are cores; otherwise, return "".

    With an accelerator, one compute thread per process counts.
    """
    processes, cores = local_world_size(), len(usable_core_numbers())
    threads = torch.get_num_threads() if device.type == "cpu" else 1
    total = processes * (threads + num_data_workers)
    if total <= cores:
        return ""
    each = f"{processes} process{'es' * (processes > 1)} with {threads} compute thread{'s' * (threads > 1)}"
    each += f" and {num_data_workers} data worker{'s' * (num_data_workers > 1)}" if num_data_workers else ""
    return f"{each}: {total} threads compete for {cores} cores; try fewer (device.threads, data.workers)"


class BusyMachine:
    """Finds out whether other programs, or data workers, keep the cores busy that the threads of a run need.

    The threads of an operation wait for each other: on two cores that other programs kept busy, the steps of a small
    network took 35 times as long with two threads as with one.
    """

    def __init__(self, device: torch.device):
        self._threads = torch.get_num_threads() if device.type == "cpu" else 1
        self._since, self._waited = time.perf_counter(), seconds_without_core()

    def warning(self) -> str:
        """Return a warning, once, if half a thread was without a core since the last call, 5 s ago or more; or ""."""
        seconds = time.perf_counter() - self._since
        if self._threads == 1 or self._waited is None or seconds < 5:
            return ""
        waited = seconds_without_core() or 0.0
        waiting = (waited - self._waited) / seconds
        self._since, self._waited = self._since + seconds, waited
        if waiting < 0.5:
            return ""
        why = f"of {self._threads} threads, {waiting:.1f} were waiting for one on average for {seconds:.0f} s"
        fewer = max(1, self._threads - math.ceil(waiting))
        self._threads = 1
        return f"the cores are busy with other work: {why}; fewer may be faster: device.threads={fewer}"


def _use_deterministic(wanted: bool) -> None:
    if wanted != torch.are_deterministic_algorithms_enabled():  # the call imports torch's compiler, which takes 1 s
        torch.use_deterministic_algorithms(wanted)


def device_name(device: torch.device) -> str:
    """Return the name of `device`, followed by the name of the hardware: `cuda:0 (NVIDIA H200)`."""
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return f"{device} ({cpu_model()})"


def sum_dtype(device: torch.device) -> torch.dtype:
    """Return the type of sums over many samples on `device`: float64, or float32 on Metal, which has no float64."""
    return torch.float64 if device.type in ("cpu", "cuda") else torch.float32


def synchronize(*devices: torch.device) -> None:
    """Wait until all work that is queued on `devices` has finished."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        elif device.type == "mps":
            torch.mps.synchronize()
