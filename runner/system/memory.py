"""Memory usage of the device and of the process, and the memory of the machine."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import torch

from runner.system.cgroup import cgroup_limits

_PROC = Path("/proc/self")


def usage(device: torch.device) -> dict[str, float]:
    """Return the peak memory usage on `device` in bytes, by TensorBoard tag, without waiting for the device.

    `memory/peak` is the peak since the last call of `reset_peak`. On CUDA, it is the peak memory allocated for tensors.
    On a CPU, it is the peak resident set size of the process. MPS keeps no peak; there, it is the GPU memory currently
    allocated for the process. `memory/peak_reserved`, only on CUDA, also counts memory that the allocator caches.
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
    """Free cached memory and reset the peak memory usage, so that each run in a process has its own peak.

    On a CPU, the peak can be reset only on Linux, and not in all containers. Elsewhere, it counts from the start of the
    process.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    elif sys.platform == "linux":
        try:
            (_PROC / "clear_refs").write_text("5")  # proc(5): resets VmHWM
        except OSError:  # not allowed in some containers, where the peak is then counted from the process's start
            return


def host_memory() -> dict[str, int | None]:
    """Return the memory of the machine and the limit of this process, in bytes.

    Returns:
        `total_bytes` and `available_bytes` of the machine; and `limit_bytes`, the limit of this process's control
        groups, or None if there is no limit below `total_bytes`.
    """
    import psutil  # imported here, because only the environment report needs it

    machine = psutil.virtual_memory()
    limits = [int(value) for (value,) in cgroup_limits("memory", "memory.max") if value != "max"]
    limits += [int(value) for (value,) in cgroup_limits("memory", "memory.limit_in_bytes")]
    limit = min(limits, default=machine.total)
    return {
        "total_bytes": machine.total,
        "available_bytes": machine.available,
        "limit_bytes": limit if limit < machine.total else None,  # version 1 reports a huge number for no limit
    }


def _peak_resident_bytes() -> float:
    try:
        with open(_PROC / "status", "rb", buffering=0) as file:  # unbuffered and undecoded, as each log reads it
            status = file.read()
        return 1024.0 * int(status.partition(b"VmHWM:")[2].split(None, 1)[0])
    except (OSError, IndexError):  # not Linux, or a container that shows less
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return float(peak if sys.platform == "darwin" else peak * 1024)
