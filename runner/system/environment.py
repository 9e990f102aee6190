"""Where a run happens, as plain values: the command, the source, the versions, and the machine.

For `environment.json` in the run directory, and for `python -m runner.tools.doctor`, which tells more and draws it.
"""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import runner
from runner.system.cpu import cpu
from runner.system.memory import host_memory

PACKAGES = ("torchvision", "hydra-core", "omegaconf", "gymnasium", "tensorboard", "safetensors", "rich")
VARIABLES = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_ROOT = Path(__file__).parent.parent


def environment() -> dict[str, Any]:
    """What somebody needs to know who wants the same numbers again; takes milliseconds, and names no host or user."""
    findings: list[str] = []
    return {
        "command": command(),
        "source": source(),
        "versions": versions(),
        "variables": {name: os.environ.get(name) for name in VARIABLES},
        "cpu": cpu(),
        "memory": host_memory(),
        "devices": devices(findings),
        "findings": findings,
    }


def command() -> str:
    """What was typed, ready to be typed again: `python -m runner …`."""
    program = Path(sys.argv[0])
    words = ["python", "-m", program.parent.name] if program.name == "__main__.py" else [program.name]
    return shlex.join([*words, *sys.argv[1:]])


def source(root: Path = _ROOT) -> dict[str, Any] | None:
    """The git commit of the source tree, and whether files differ from it; None when `root` is no checkout."""
    if not (root / ".git").exists():  # an installed package may lie in somebody else's repository
        return None
    # Inside a git hook these name the repository that is being committed to.
    variables = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    words = ["git", "--no-optional-locks", "-C", str(root), "status", "--porcelain=v2", "--branch"]
    try:
        told = subprocess.run(words, env=variables, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    lines = told.stdout.splitlines()
    commit = next((line.split()[2] for line in lines if line.startswith("# branch.oid ")), "(initial)")
    return {
        "commit": None if commit == "(initial)" else commit,
        "dirty": any(not line.startswith("#") for line in lines),
    }


def versions() -> dict[str, Any]:
    """What computes, by name; None for what is not there."""
    return {
        "runner": runner.__version__,
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "torch": str(torch.__version__),
        **{name: _version(name) for name in PACKAGES},
        "cuda": torch.version.cuda,
        "os": platform.platform(),
    }


def devices(findings: list[str]) -> list[dict[str, Any]]:
    """The accelerators that torch sees, in short; what is wrong with them goes into `findings`."""
    found: list[dict[str, Any]] = []
    with noted(findings, "CUDA"):
        if torch.cuda.is_available():
            for index in range(torch.cuda.device_count()):
                found.append(_cuda_device(index))  # one by one: what was found before an error is told
    if torch.backends.mps.is_available():
        total = torch.mps.recommended_max_memory()
        found.append({"device": "mps", "name": cpu()["model"], "total_bytes": total, "capability": None})
    return found


@contextmanager
def noted(findings: list[str], what: str) -> Iterator[None]:
    """Errors and warnings from inside become findings: a broken driver is to be told of, not to stop us."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield
        except Exception as error:
            findings.append(f"{what}: {type(error).__name__}: {_first_line(error)}")
    findings += [f"{what}: {_first_line(warning.message)}" for warning in caught]


def _cuda_device(index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    return {
        "device": f"cuda:{index}",
        "name": properties.name,
        "total_bytes": properties.total_memory,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _first_line(message: object) -> str:
    lines = str(message).strip().splitlines()
    return lines[0] if lines else "no reason given"
