"""The CPU of this machine, and how many of its cores this process may use."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from runner.system.cgroup import cgroup_limits, read_lines

_PROC = Path("/proc")

FEATURES = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16", "amx_fp16", "asimd", "sve", "bf16")
"""The instruction sets, by their Linux names, that decide how fast a CPU trains and in which precision."""


def cpu() -> dict[str, Any]:
    """Model, cores and instruction sets; None for what this system does not report."""
    import psutil  # here, not above: only reports need it

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
    """The name of the CPU, or of its architecture where the system does not report one."""
    blocks = _cpuinfo()
    name = blocks[0].get("model name") if blocks else None
    return name or _sysctl("machdep.cpu.brand_string") or platform.machine()


def allowed_cores() -> int:
    """The logical cores in this process's affinity mask."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def usable_cores(processor: dict[str, Any]) -> float:
    """How many cores this process may keep busy: those of its affinity mask, or its control group's quota if fewer."""
    return min(processor["allowed_cores"], processor["quota_cores"] or processor["allowed_cores"])


def _cpuinfo() -> list[dict[str, str]]:
    """A table per logical core, as in /proc/cpuinfo."""
    blocks: list[dict[str, str]] = [{}]
    for line in read_lines(_PROC / "cpuinfo"):
        name, colon, value = line.partition(":")
        if colon:
            blocks[-1][name.strip()] = value.strip()
        elif blocks[-1]:
            blocks.append({})
    return [block for block in blocks if block]


def _quota_cores() -> float | None:
    """The tightest of the quotas on this process's control groups, in cores; None where there is none."""
    pairs = [*cgroup_limits("cpu", "cpu.max"), *cgroup_limits("cpu", "cpu.cfs_quota_us", "cpu.cfs_period_us")]
    return min((int(quota) / int(period) for quota, period in pairs if quota not in ("max", "-1")), default=None)


def _sysctl(name: str) -> str | None:
    """The value of `name` on macOS."""
    if platform.system() != "Darwin":
        return None
    output = subprocess.run(["sysctl", "-n", name], capture_output=True, text=True, check=False, timeout=5)
    return output.stdout.strip() or None
