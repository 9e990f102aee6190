"""The device of a run, which is chosen automatically or named in the config."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch

from runner.config.errors import ConfigError, check
from runner.config.limits import NonNegativeInt, NumThreads
from runner.system import accelerator
from runner.system.cpu import cores_per_process, cpu_model, local_world_size, usable_core_numbers
from runner.system.memory import freed_memory_kept


@dataclass
class Device:
    """The requested device; `resolve` checks that it is available. The options are documented in conf/device/."""

    kind: str = "auto"
    index: NonNegativeInt | None = None
    indices: list[NonNegativeInt] = field(default_factory=list)
    threads: NumThreads | None = None
    memory_snapshot: bool = False

    def __post_init__(self) -> None:
        if self.kind not in ("auto", "cpu"):
            try:
                torch.device(self.kind, 0)
            except RuntimeError:
                known = "auto, cpu, cuda, mps, xpu, or the device type that a plugin of torch adds"
                raise ConfigError("kind", self.kind, "torch has no devices of this type", known) from None
        if self.index is not None and self.indices not in ([], [self.index]):
            why = f"device.indices={self.indices} names other devices"
            raise ConfigError("index", self.index, why, "leave one of the two out")
        if len(set(self.indices)) < len(self.indices):
            raise ConfigError("indices", self.indices, "they must be distinct", "for example device.indices=[0,1]")
        if self.kind == "cpu":
            self.check_unnumbered()
        if self.memory_snapshot and self.resolved_kind() != "cuda":
            raise ConfigError("memory_snapshot", True, "only CUDA devices record it", "device.memory_snapshot=false")

    def resolved_kind(self) -> str:
        """Return the device type to compute on: that of the accelerator, or `cpu`, if it is to be chosen."""
        return (accelerator.accelerator_type() or "cpu") if self.kind == "auto" else self.kind

    def check_unnumbered(self) -> None:
        """Raise a `ConfigError` if a device is requested by index, for a run on the CPU."""
        why = "the device is the cpu"
        check(self.index is None, "index", self.index, why, "leave device.index=null")
        check(not self.indices, "indices", self.indices, why, "leave device.indices=[]")

    def resolve_all(self) -> list[torch.device]:
        """Return the devices to compute on: those that `index` or `indices` selects, all visible ones, or the CPU.

        Raises:
            ConfigError: if a requested device is not available.
        """
        kind = self.resolved_kind()
        if kind == "cpu":
            self.check_unnumbered()
            return [torch.device("cpu")]
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        of_visible = f" (CUDA_VISIBLE_DEVICES={visible!r})" if visible is not None and kind == "cuda" else ""
        if why := accelerator.why_unavailable(kind):
            raise ConfigError("kind", kind, f"{why}{of_visible}", _AVAILABLE)
        count = torch.accelerator.device_count()
        key, chosen = ("index", [self.index]) if self.index is not None else ("indices", self.indices or range(count))
        why = f"{count} {kind.upper()} device{'s are' if count > 1 else ' is'} visible{of_visible}"
        check(all(index < count for index in chosen), key, getattr(self, key), why, f"choose from 0 to {count - 1}")
        return [torch.device(kind, index) for index in chosen]

    @contextmanager
    def settings(self, device: torch.device, deterministic: bool, num_data_workers: int = 0) -> Iterator[None]:
        """Set torch's global flags for one run, the current device among them, and restore them afterwards.

        The environment variable CUBLAS_WORKSPACE_CONFIG is set, and stays set. On a CPU, freed memory is kept in the
        process during the run (see `runner.system.memory`).

        Raises:
            ConfigError: if `device` cannot be used: another process has it alone, or all of its memory, or torch has no
                code for it.
        """
        before = torch.get_num_threads(), torch.backends.cudnn.benchmark, torch.are_deterministic_algorithms_enabled()
        if deterministic:
            # https://docs.nvidia.com/cuda/cublas/index.html#results-reproducibility
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.set_num_threads(self.threads or default_threads(device, num_data_workers))
        torch.backends.cudnn.benchmark = device.type != "cpu" and not deterministic
        _use_deterministic(deterministic)
        try:
            # Not `set_device_index`, which would make a context on the device that it restores.
            on_cpu = device.type == "cpu"
            with freed_memory_kept() if on_cpu else torch.accelerator.device_index(device.index):
                if not on_cpu:
                    _check_usable(device)
                yield
        finally:
            torch.set_num_threads(before[0])
            torch.backends.cudnn.benchmark = before[1]
            _use_deterministic(before[2])

    def memory_recorded(self, path: Path) -> AbstractContextManager[None]:
        """Return a context which, with `memory_snapshot`, writes torch's record of the memory if it runs out."""
        return accelerator.memory_recorded(path) if self.memory_snapshot else nullcontext()


def _check_usable(device: torch.device) -> None:
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        why = str(error).strip().splitlines()[0]
        raise ConfigError("device.kind", str(device), f"its first use failed: {why}", _AVAILABLE) from error


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
    counts = f"{processes} × (device.threads={threads} + data.workers={num_data_workers})"
    return f"{total} threads compete for {cores} cores: {counts}; fewer may be faster"


def _use_deterministic(wanted: bool) -> None:
    if wanted != torch.are_deterministic_algorithms_enabled():  # the call imports torch's compiler, which takes 1 s
        torch.use_deterministic_algorithms(wanted)


def device_name(device: torch.device) -> str:
    """Return the name of `device`, followed by the name of the hardware: `cuda:0 (NVIDIA H200)`."""
    properties = None if device.type == "cpu" else accelerator.properties(device)
    return f"{device} ({cpu_model() if properties is None else properties.name})"  # Metal's GPU is part of the CPU


def sum_dtype(device: torch.device) -> torch.dtype:
    """Return the type of sums over many samples on `device`: float64, or float32 if it has no float64."""
    return torch.float64 if device.type == "cpu" or accelerator.has_float64(device) else torch.float32


def synchronize(*devices: torch.device) -> None:
    """Wait until all work that is queued on `devices` has finished."""
    for device in devices:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)


def flops_per_second(device: torch.device, dtype: torch.dtype, side: int = 4096) -> float:
    """Return the floating-point operations per second of `device` in products of two matrices of `side`²: the median.

    TF32 is used if it is switched on. Returns 0 if there is no memory for the matrices, or no product of them.
    """
    try:
        a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        times: list[float] = []
        while len(times) < 3 or (len(times) < 20 and sum(times) < 0.2):  # the first are slower, which a median ignores
            synchronize(device)
            began = time.perf_counter()
            torch.matmul(a, b)
            synchronize(device)
            times.append(time.perf_counter() - began)
    except RuntimeError:
        return 0.0
    return 2 * side**3 / statistics.median(times)
