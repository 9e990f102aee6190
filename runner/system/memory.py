"""Memory in use on the device and by the process, and how much the machine has."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import torch

from runner.system.cgroup import cgroup_limits

_PROC = Path("/proc/self")


def usage(device: torch.device) -> dict[str, float]:
    """Bytes by TensorBoard tag; on CUDA from the allocator, without waiting for the device.

    `memory/peak` is the most since `reset_peak`: of the allocator's tensors on CUDA, of the process elsewhere.
    """
    if device.type == "cuda":
        return {
            "memory/allocated": torch.cuda.memory_allocated(device),
            "memory/reserved": torch.cuda.memory_reserved(device),
            "memory/peak": torch.cuda.max_memory_allocated(device),
            "memory/peak_reserved": torch.cuda.max_memory_reserved(device),
        }
    if device.type == "mps":
        allocated = torch.mps.driver_allocated_memory()
        return {"memory/allocated": torch.mps.current_allocated_memory(), "memory/peak": allocated}
    return {"memory/allocated": _process("VmRSS"), "memory/peak": _process("VmHWM")}


def reset_peak(device: torch.device) -> None:
    """Reset the peak and free cached memory: the jobs of a sweep share a process."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    elif sys.platform == "linux":
        try:
            (_PROC / "clear_refs").write_text("5")  # proc(5): resets VmHWM
        except OSError:  # some containers forbid it: the peak is then that of the whole process
            return


def host_memory() -> dict[str, int | None]:
    """Bytes of main memory: in total, what programs can still use, and the limit of this process's control group."""
    import psutil  # here, not above: most runs do not ask

    machine = psutil.virtual_memory()
    limits = [int(value) for (value,) in cgroup_limits("memory", "memory.max") if value != "max"]
    limits += [int(value) for (value,) in cgroup_limits("memory", "memory.limit_in_bytes")]
    limit = min(limits, default=machine.total)
    return {
        "total_bytes": machine.total,
        "available_bytes": machine.available,
        "limit_bytes": limit if limit < machine.total else None,  # without a limit, version 1 gives a huge number
    }


def _process(field: str) -> float:
    """A line of /proc/self/status in bytes; on other systems the peak that getrusage reports."""
    try:
        status = (_PROC / "status").read_text()
        return 1024.0 * int(status.split(f"{field}:")[1].split()[0])
    except (OSError, IndexError):
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return float(peak if sys.platform == "darwin" else peak * 1024)
