"""Memory usage of the device and of the process, the memory of the machine, and what happens to freed memory."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from runner.system.cpu import cgroup_limits

_PROC = Path("/proc/self")


def usage(device: torch.device) -> dict[str, float]:
    """Return the peak memory usage on `device` in bytes, by TensorBoard tag, without waiting for the device.

    `memory/peak` is the peak since the last `reset_peak`: of the process's resident set on a CPU, and otherwise of
    tensors. Metal keeps no peak: it is the memory that the process has now. `memory/peak_reserved`, of other
    accelerators, also counts what the allocator caches.
    """
    if device.type == "cpu":
        return {"memory/peak": _peak_resident_bytes()}
    if device.type == "mps":
        return {"memory/peak": torch.mps.driver_allocated_memory()}
    return {
        "memory/peak": torch.accelerator.max_memory_allocated(device),
        "memory/peak_reserved": torch.accelerator.max_memory_reserved(device),
    }


def reset_peak(device: torch.device) -> None:
    """Free cached memory and reset the peak memory usage; on a CPU, the peak is reset only on Linux."""
    gc.collect()
    if device.type not in ("cpu", "mps"):
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats(device)
    elif device.type == "cpu":
        if libc := _glibc():
            libc.malloc_trim(0)
        with suppress(OSError):  # not allowed in some containers, where the peak then counts from the process's start
            (_PROC / "clear_refs").write_text("5")  # proc(5): resets VmHWM


def host_memory() -> dict[str, int | None]:
    """Return in bytes `total_bytes` of the machine and `available_bytes` to this process within its control groups.

    `limit_bytes` is the lowest limit of these groups; None if none is below `total_bytes`.
    """
    import psutil

    machine, groups = psutil.virtual_memory(), []
    for limit, *more in cgroup_limits("memory.max", "memory.current", "memory.stat"):
        if limit.isdecimal():  # otherwise `max`, or the statistics of the root group, which has no limit
            used = int(more[0]) if more and more[0].isdecimal() else 0
            stat = dict(zip(more[1::2], more[2::2], strict=False))
            cached = sum(int(stat.get(name, 0)) for name in ("active_file", "inactive_file"))
            groups.append((int(limit), used - cached))
    limit = min((limit for limit, _ in groups), default=machine.total)
    return {
        "total_bytes": machine.total,
        "available_bytes": max(0, min([machine.available, *(limit - used for limit, used in groups)])),
        "limit_bytes": limit if limit < machine.total else None,
    }


@contextmanager
def too_little_memory_raises(device: torch.device) -> Iterator[None]:
    """A context in which a module raises `MemoryError` if a twentieth of the memory is left after its forward pass.

    On a CPU: Linux gives out more memory than there is, and kills a process that uses it.
    """
    if device.type != "cpu":
        yield
        return
    memory, checked = host_memory(), 0.0
    least = (memory["limit_bytes"] or memory["total_bytes"] or 0) / 20

    def check(*_: object) -> None:
        nonlocal checked
        if time.monotonic() - checked > 0.01:
            checked = time.monotonic()
            if (left := host_memory()["available_bytes"] or 0) < least:
                raise MemoryError(f"{left} bytes of memory are left")

    hook = torch.nn.modules.module.register_module_forward_hook(check)
    try:
        yield
    finally:
        hook.remove()


def _peak_resident_bytes() -> float:
    try:
        with open(_PROC / "status", "rb", buffering=0) as file:  # unbuffered and undecoded, as each log reads it
            status = file.read()
        return 1024.0 * int(status.partition(b"VmHWM:")[2].split(None, 1)[0])
    except (OSError, IndexError):  # not Linux, or a container that shows less
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return float(peak if sys.platform == "darwin" else peak * 1024)


_THRESHOLDS = (-3, -1)
"""The parameters M_MMAP_THRESHOLD and M_TRIM_THRESHOLD of `mallopt`, from malloc.h."""

_KEPT = 2**30
"""Blocks of at least this size, such as a data set, are returned nevertheless."""

_DEFAULT = 2**25
"""The largest threshold that glibc chooses by itself (DEFAULT_MMAP_THRESHOLD_MAX on 64-bit systems)."""


@contextmanager
def freed_memory_kept() -> Iterator[None]:
    """A context in which glibc keeps freed blocks of less than 1 GiB, and at its end returns them.

    By default, glibc returns large blocks to the operating system at once. A step of ResNet50 with eight micro-batches
    of three samples would get 130,000 to 200,000 new pages, filled with zeros.
    https://man7.org/linux/man-pages/man3/mallopt.3.html

    With any other C library, and if an environment variable sets the thresholds, this context does nothing.
    """
    libc = _glibc()
    if libc is None:
        yield
        return
    for parameter in _THRESHOLDS:
        if not libc.mallopt(parameter, _KEPT):  # older versions refuse more than the largest default
            libc.mallopt(parameter, _DEFAULT)
    try:
        yield
    finally:
        for parameter in _THRESHOLDS:
            libc.mallopt(parameter, _DEFAULT)
        libc.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    chosen = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"} & os.environ.keys()
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "gnu_get_libc_version") and not chosen else None
