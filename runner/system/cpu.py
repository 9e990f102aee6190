"""The CPU of the machine, and the cores that this process may use."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")

FEATURES = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16", "amx_fp16", "asimd", "sve", "bf16")
"""The CPU instruction sets that matter for training, by their names in Linux."""


def cpu() -> dict[str, Any]:
    """Return the CPU's model, core counts and instruction sets; None for what the system does not report.

    `quota_cores` is the CPU quota of the control groups, `threads` torch's number of threads, and `capability` the
    instruction set that torch uses.
    """
    import psutil

    about = _cpuinfo()
    flags = about.get("flags", about.get("Features", "")).split()
    return {
        "model": cpu_model(),
        "physical_cores": psutil.cpu_count(logical=False),
        "logical_cores": os.cpu_count(),
        "allowed_cores": len(_allowed_cores()),
        "quota_cores": _quota_cores(),
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "features": [name for name in FEATURES if name in flags],
    }


def cpu_model() -> str:
    """Return the name of the CPU, or its architecture if the system does not report the name."""
    return _cpuinfo().get("model name") or platform.processor() or platform.machine()


def usable_core_numbers() -> list[int]:
    """Return the indices of the logical cores that this process may use, at most as many as its CPU quota allows."""
    quota = _quota_cores()
    return _allowed_cores() if quota is None else _allowed_cores()[: max(1, int(quota))]


def local_world_size() -> int:
    """Return the number of processes of this run on this machine, which share its cores."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def cores_per_process() -> int:
    """Return the number of cores for each process of this run on this machine, at least one."""
    return max(1, len(usable_core_numbers()) // local_world_size())


def _allowed_cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):  # missing on macOS
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _cpuinfo() -> dict[str, str]:
    """Return what /proc/cpuinfo says of all cores together; of what differs, the values of the last one."""
    pairs = (line.partition(":") for line in _lines(_PROC / "cpuinfo"))
    return {name.strip(): value.strip() for name, _, value in pairs}


def _quota_cores() -> float | None:
    """Return the lowest CPU quota of this process's control groups, in cores; None if there is no quota."""
    limits = cgroup_limits("cpu.max")
    return min((int(quota) / int(period) for quota, period in limits if quota != "max"), default=None)


def cgroup_limits(*names: str) -> Iterator[list[str]]:
    """Yield the words in the files `names` of this process's control group (version 2), then of each ancestor.

    Control groups that have none of the files are skipped.
    """
    for line in _lines(_PROC / "self" / "cgroup"):
        if line.startswith("0::"):  # the others are of version 1
            group = _CGROUP / line.removeprefix("0::/")
            # In a container, the path may be the one on the host; the container's group is then mounted as the root.
            for folder in (group, *(parent for parent in group.parents if parent.is_relative_to(_CGROUP))):
                words = [word for name in names for line in _lines(folder / name) for word in line.split()]
                if words:
                    yield words


def _lines(path: Path) -> list[str]:
    with suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    return []
