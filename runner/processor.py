"""The CPU and the memory of this machine, and how much of them this process may use."""

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
"""The instructions, as Linux names them, that decide how fast a CPU trains and in which precision."""


def cpu() -> dict[str, Any]:
    """Model, cores, and instructions; None for what this system does not tell."""
    blocks = _cpuinfo()
    first = blocks[0] if blocks else {}
    flags = first.get("flags", first.get("Features", "")).split()
    return {
        "model": first.get("model name") or _sysctl("machdep.cpu.brand_string") or platform.machine(),
        "physical_cores": _physical_cores(blocks),
        "logical_cores": os.cpu_count(),
        "allowed_cores": allowed_cores(),
        "quota_cores": _quota_cores(),
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "features": [name for name in FEATURES if name in flags],
    }


def allowed_cores() -> int:
    """The logical cores in this process's affinity mask."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def memory() -> dict[str, int | None]:
    """Bytes of main memory: all, what programs could still take, and what this process's control group may take."""
    pairs = (line.split(":") for line in _lines(_PROC / "meminfo") if ":" in line)
    table = {name: int(value.split()[0]) * 1024 for name, value in pairs}
    total = table.get("MemTotal", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    limits = [int(value) for (value,) in _limits("memory", "memory.max") if value != "max"]
    limits += [int(value) for (value,) in _limits("memory", "memory.limit_in_bytes")]
    limit = min(limits, default=total)
    return {
        "total_bytes": total,
        "available_bytes": table.get("MemAvailable"),
        "limit_bytes": limit if limit < total else None,  # without a limit, version 1 tells a huge number
    }


def usable_cores(processor: dict[str, Any]) -> float:
    """The cores that this process may keep busy: those of its affinity mask, or its control group's quota if fewer."""
    return min(processor["allowed_cores"], processor["quota_cores"] or processor["allowed_cores"])


def _cpuinfo() -> list[dict[str, str]]:
    """One table a logical core, as /proc/cpuinfo gives them."""
    blocks: list[dict[str, str]] = [{}]
    for line in _lines(_PROC / "cpuinfo"):
        name, colon, value = line.partition(":")
        if colon:
            blocks[-1][name.strip()] = value.strip()
        elif blocks[-1]:
            blocks.append({})
    return [block for block in blocks if block]


def _physical_cores(blocks: list[dict[str, str]]) -> int | None:
    cores = {(block.get("physical id"), block["core id"]) for block in blocks if "core id" in block}
    told = _sysctl("hw.physicalcpu") if not cores else None
    return len(cores) or (int(told) if told else None)


def _quota_cores() -> float | None:
    """The tightest of the quotas on this process, as a number of cores; None where there is none."""
    pairs = [*_limits("cpu", "cpu.max"), *_limits("cpu", "cpu.cfs_quota_us", "cpu.cfs_period_us")]
    return min((int(quota) / int(period) for quota, period in pairs if quota not in ("max", "-1")), default=None)


def _limits(controller: str, *names: str) -> Iterator[list[str]]:
    """The words of the files `names` in this process's control group and in each above it, where they are."""
    for line in _lines(_PROC / "self" / "cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = _CGROUP / controller if controllers else _CGROUP  # a hierarchy a controller is version 1
        own = root / path.lstrip("/")
        # Inside a container the path may be the host's: its own group then is the root that is mounted.
        for folder in (own, *(above for above in own.parents if above.is_relative_to(root))):
            words = [word for name in names for line in _lines(folder / name) for word in line.split()]
            if words:
                yield words


def _lines(path: Path) -> list[str]:
    """The lines of a file; none where it cannot be read, as on another system."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _sysctl(name: str) -> str | None:
    """What macOS tells of `name`."""
    if platform.system() != "Darwin":
        return None
    told = subprocess.run(["sysctl", "-n", name], capture_output=True, text=True, check=False, timeout=5)
    return told.stdout.strip() or None
