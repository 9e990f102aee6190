"""Memory in use, on the device and of the process."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import torch

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
    """Forget the peak of what ran before, and give its memory back: the jobs of a sweep share a process."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    elif sys.platform == "linux":
        try:
            (_PROC / "clear_refs").write_text("5")  # proc(5): resets VmHWM
        except OSError:  # some containers forbid it: the peak is then that of the whole process
            return


def _process(field: str) -> float:
    """A line of /proc/self/status in bytes; where there is none, the peak that getrusage tells."""
    try:
        status = (_PROC / "status").read_text()
        return 1024.0 * int(status.split(f"{field}:")[1].split()[0])
    except (OSError, IndexError):
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return float(peak if sys.platform == "darwin" else peak * 1024)
