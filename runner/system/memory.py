"""Memory usage of the device and of the process, and the memory of the machine."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from runner.system.cpu import cgroup_limits

_PROC = Path("/proc/self")


def usage(device: torch.device) -> dict[str, float]:
    """Return the peak memory usage on `device` in bytes, by TensorBoard tag, without waiting for the device.

    `memory/peak` is the peak since the last `reset_peak`: of tensors on CUDA, of the process's resident set on a CPU.
    MPS keeps no peak: it is the GPU memory that the process has now. `memory/peak_reserved`, only on CUDA, also counts
    what the allocator caches.
    """
    if device.type == "cuda":
        return {
            "memory/peak": torch.cuda.max_memory_allocated(device),
            "memory/peak_reserved": torch.cuda.max_memory_reserved(device),
        }
    if device.type == "mps":
        return {"memory/peak": torch.mps.driver_allocated_memory()}
    return {"memory/peak": _peak_resident_bytes()}


def reset_peak(device: torch.device) -> None:
    """Free cached memory and reset the peak memory usage; on a CPU, the peak is reset only on Linux."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.init()  # without it, there are no statistics to reset
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    elif sys.platform == "linux":
        try:
            (_PROC / "clear_refs").write_text("5")  # proc(5): resets VmHWM
        except OSError:  # not allowed in some containers, where the peak is then counted from the process's start
            return


def host_memory() -> dict[str, int | None]:
    """Return in bytes `total_bytes` of the machine and `available_bytes` to this process within its control groups.

    `limit_bytes` is the lowest limit of these groups; None if none is below `total_bytes`.
    """
    import psutil

    machine = psutil.virtual_memory()
    groups = [*_limited_groups("memory.max", "memory.current"), *_limited_groups(*_VERSION_1, stat_prefix="total_")]
    limit = min((limit for limit, _ in groups), default=machine.total)
    return {
        "total_bytes": machine.total,
        "available_bytes": max(0, min([machine.available, *(limit - used for limit, used in groups)])),
        "limit_bytes": limit if limit < machine.total else None,  # version 1 reports a huge number for no limit
    }


_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")


def _limited_groups(limit_file: str, usage_file: str, stat_prefix: str = "") -> Iterator[tuple[int, int]]:
    """Yield the limit and the usage of each control group with a limit, in bytes; cached files do not count."""
    for limit, *more in cgroup_limits("memory", limit_file, usage_file, "memory.stat"):
        if limit.isdecimal():  # otherwise `max`, or the statistics of the root group, which has no limit
            usage = int(more[0]) if more and more[0].isdecimal() else 0
            stat = dict(zip(more[1::2], more[2::2], strict=False))
            cached = sum(int(stat.get(f"{stat_prefix}{name}", 0)) for name in ("active_file", "inactive_file"))
            yield int(limit), usage - cached


def _peak_resident_bytes() -> float:
    try:
        with open(_PROC / "status", "rb", buffering=0) as file:  # unbuffered and undecoded, as each log reads it
            status = file.read()
        return 1024.0 * int(status.partition(b"VmHWM:")[2].split(None, 1)[0])
    except (OSError, IndexError):  # not Linux, or a container that shows less
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return float(peak if sys.platform == "darwin" else peak * 1024)
