"""The CPU of the machine, and the cores that this process may use."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch

from runner.system.cgroup import cgroup_limits, read_lines

_PROC = Path("/proc")

_cores_of_run: list[int] | None = None
"""The indices of the logical cores of all processes of this run; None before `keep_to_own_cores`."""

FEATURES = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16", "amx_fp16", "asimd", "sve", "bf16")
"""The CPU instruction sets that matter for training, by their names in Linux."""


def cpu() -> dict[str, Any]:
    """Return the CPU's model, core counts and instruction sets.

    Returns:
        A dictionary with these keys:

        - `model`: the name of the CPU, or its architecture if the system does not report the name.
        - `physical_cores` and `logical_cores`: the numbers of cores; None if the system does not report them.
        - `allowed_cores`: the result of `allowed_cores()`.
        - `quota_cores`: the CPU quota of the control groups, in cores; None if there is no quota.
        - `threads`: torch's number of threads.
        - `capability`: the instruction set that torch uses.
        - `features`: the instruction sets in `FEATURES` that the CPU has, as far as /proc/cpuinfo lists them.
    """
    import psutil  # imported here, because only the environment report needs it

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
    """Return the name of the CPU, or its architecture if the operating system does not report the name."""
    blocks = _cpuinfo()
    name = blocks[0].get("model name") if blocks else None
    return name or _sysctl("machdep.cpu.brand_string") or platform.machine()


def allowed_cores() -> int:
    """Return the number of logical cores in this process's affinity mask.

    On macOS, which has no affinity masks, return the number of all logical cores.
    """
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


def keep_to_own_cores(index: int, count: int) -> None:
    """Divide the physical cores evenly among the processes of a run, and let this process compute only on its own.

    Without this division, a process that has waited for a message often continues on a core on which another process
    computes, until the operating system moves one of them. With a pipeline of two stages, this takes 6 to 9 % of the
    time.

    Other functions of this module still return the cores of all processes. Nothing is changed if there are fewer
    physical cores than processes, if a CPU quota is lower than the number of cores, as other programs may then compute
    on the same cores, or if the operating system has no affinity masks.

    Args:
        index: the index of this process among the processes of the run on this machine.
        count: the number of these processes.
    """
    global _cores_of_run
    cores = _affinity()
    shared = _physical_cores(cores)
    if len(shared) < count or len(usable_core_numbers()) < len(cores) or not hasattr(os, "sched_setaffinity"):
        return
    _cores_of_run = cores
    own = shared[index * len(shared) // count : (index + 1) * len(shared) // count]
    os.sched_setaffinity(0, [core for siblings in own for core in siblings])


def _physical_cores(cores: list[int]) -> list[list[int]]:
    """Return the logical cores `cores`, grouped by the physical core that they share, in the order of the sockets.

    If /proc/cpuinfo does not tell the physical cores, each logical core counts as one.
    """
    places: dict[int, tuple[int, int]] = {}
    for block in _cpuinfo():
        if block.keys() >= {"processor", "physical id", "core id"}:
            places[int(block["processor"])] = int(block["physical id"]), int(block["core id"])
    groups: dict[tuple[int, ...], list[int]] = {}
    for core in cores:
        groups.setdefault(places.get(core, (-1, -1, core)), []).append(core)
    return [groups[place] for place in sorted(groups)]


def usable_cores(processor: dict[str, Any]) -> float:
    """Return how many cores this process may keep busy, given its affinity mask and its control group's CPU quota.

    Args:
        processor: the result of `cpu()`.
    """
    return min(processor["allowed_cores"], processor["quota_cores"] or processor["allowed_cores"])


def seconds_without_core() -> float | None:
    """Return the sum of the times in seconds for which threads of this process were ready to run, but had no core.

    Only threads that exist count. None if the system does not tell (https://docs.kernel.org/scheduler/sched-stats.html).
    """
    nanoseconds = [lines[0].split()[1] for path in _PROC.glob("self/task/*/schedstat") if (lines := read_lines(path))]
    return sum(map(int, nanoseconds)) / 1e9 if nanoseconds else None


def _affinity() -> list[int]:
    """Return the indices of the logical cores in the affinity mask of this process.

    The mask is the one that the process had before `keep_to_own_cores`.
    """
    if _cores_of_run is not None:
        return _cores_of_run
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
    """Return the value of a macOS system parameter; None if it is unknown, and on other operating systems."""
    if platform.system() != "Darwin":
        return None
    import subprocess  # imported here, so that config errors do not wait for it

    output = subprocess.run(["sysctl", "-n", name], capture_output=True, text=True, check=False, timeout=5)
    return output.stdout.strip() or None
