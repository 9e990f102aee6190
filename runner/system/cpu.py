"""The CPU of the machine, and the cores that this process may use."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterator
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

    blocks = _cpuinfo()
    first = blocks[0] if blocks else {}
    flags = first.get("flags", first.get("Features", "")).split()
    return {
        "model": cpu_model(),
        "physical_cores": psutil.cpu_count(logical=False),
        "logical_cores": os.cpu_count(),
        "allowed_cores": allowed_cores(),
        "quota_cores": _quota_cores(),
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "features": [name for name in FEATURES if name in flags],
    }


def cpu_model() -> str:
    """Return the name of the CPU, or its architecture if the system does not report the name."""
    blocks = _cpuinfo()
    name = blocks[0].get("model name") if blocks else None
    return name or _sysctl("machdep.cpu.brand_string") or platform.machine()


def allowed_cores() -> int:
    """Return the number of logical cores in this process's affinity mask; on macOS, of all logical cores."""
    return len(_affinity())


def usable_core_numbers() -> list[int]:
    """Return the indices of the logical cores that this process may use, at most as many as its CPU quota allows."""
    quota = _quota_cores()
    return _affinity() if quota is None else _affinity()[: max(1, int(quota))]


def local_world_size() -> int:
    """Return the number of processes of this run on this machine, which share its cores."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def cores_per_process() -> int:
    """Return the number of cores for each process of this run on this machine, at least one."""
    return max(1, len(usable_core_numbers()) // local_world_size())


def usable_cores(processor: dict[str, Any]) -> float:
    """Return how many cores this process may keep busy, according to `processor`, the result of `cpu()`."""
    return min(processor["allowed_cores"], processor["quota_cores"] or processor["allowed_cores"])


def seconds_without_core() -> float | None:
    """Return the sum of the times in seconds for which threads of this process were ready to run, but had no core.

    Only threads that exist count. None if the system does not tell (https://docs.kernel.org/scheduler/sched-stats.html).
    """
    nanoseconds = [lines[0].split()[1] for path in _PROC.glob("self/task/*/schedstat") if (lines := read_lines(path))]
    return sum(map(int, nanoseconds)) / 1e9 if nanoseconds else None


def _affinity() -> list[int]:
    if hasattr(os, "sched_getaffinity"):  # missing on macOS
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _cpuinfo() -> list[dict[str, str]]:
    """Return the content of /proc/cpuinfo, as one dictionary per logical core."""
    blocks: list[dict[str, str]] = [{}]
    for line in read_lines(_PROC / "cpuinfo"):
        name, colon, value = line.partition(":")
        if colon:
            blocks[-1][name.strip()] = value.strip()
        elif blocks[-1]:
            blocks.append({})
    return [block for block in blocks if block]


def _quota_cores() -> float | None:
    """Return the lowest CPU quota of this process's control groups, in cores; None if there is no quota."""
    pairs = [*cgroup_limits("cpu", "cpu.max"), *cgroup_limits("cpu", "cpu.cfs_quota_us", "cpu.cfs_period_us")]
    return min((int(quota) / int(period) for quota, period in pairs if quota not in ("max", "-1")), default=None)


def _sysctl(name: str) -> str | None:
    if platform.system() != "Darwin":
        return None
    output = subprocess.run(["sysctl", "-n", name], capture_output=True, text=True, check=False, timeout=5)
    return output.stdout.strip() or None


def cgroup_limits(controller: str, *names: str) -> Iterator[list[str]]:
    """Yield the words in the files `names` of this process's control group (version 1 or 2), then of each ancestor.

    Control groups that have none of the files are skipped. `controller` is `cpu` or `memory`.
    """
    for line in read_lines(_PROC / "self" / "cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = _CGROUP / controller if controllers else _CGROUP  # version 1 has one hierarchy per controller
        group = root / path.lstrip("/")
        # In a container, the path may be the one on the host; the container's own group is then mounted as the root.
        for folder in (group, *(parent for parent in group.parents if parent.is_relative_to(root))):
            words = [word for name in names for line in read_lines(folder / name) for word in line.split()]
            if words:
                yield words


def read_lines(path: Path) -> list[str]:
    """Return the lines of the file at `path`; an empty list if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
