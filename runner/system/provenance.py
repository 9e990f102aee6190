"""The environment of a run as plain values: command, source, versions and machine (`environment.json`)."""

from __future__ import annotations

import functools
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

from runner.system import __version__, accelerator
from runner.system.cpu import cpu
from runner.system.memory import host_memory
from runner.system.secrets import printable, redacted, redacted_values

PACKAGES = ("torchvision", "hydra-core", "omegaconf", "gymnasium", "tensorboard", "safetensors", "rich")
VARIABLES = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_ROOT = Path(__file__).parent.parent.parent


def environment() -> dict[str, Any]:
    """Return what is needed to reproduce a run, and `findings` about devices; no host name, user name or secrets."""
    findings: list[str] = []
    return {
        "command": command(),
        "source": source(),
        "versions": versions(),
        "variables": redacted_values({name: os.environ.get(name) for name in VARIABLES}),
        "cpu": cpu(),
        "memory": host_memory(),
        "devices": devices(findings),
        "findings": findings,
    }


def command() -> str:
    """Return the command line of this process, such as `python -m runner …`, quoted for a shell and without secrets."""
    program = Path(sys.argv[0])
    words = ["python", "-m", program.parent.name] if program.name == "__main__.py" else [program.name]
    typed = shlex.join([*words, *redacted_values(sys.argv[1:])])  # word by word, because a word may contain spaces
    return redacted(printable(typed))


def source(root: Path = _ROOT) -> dict[str, Any] | None:
    """Return the git `commit` of the source tree, None before the first, and whether it is `dirty`; or None."""
    if not (root / ".git").exists():  # an installed package may be inside an unrelated repository
        return None
    try:
        status = git(root, "--no-optional-locks", "status", "--porcelain=v2", "--branch")
    except (OSError, subprocess.SubprocessError):
        return None
    lines = status.splitlines()
    commit = next((line.split()[2] for line in lines if line.startswith("# branch.oid ")), "(initial)")
    dirty = any(not line.startswith("#") for line in lines)
    return {"commit": None if commit == "(initial)" else commit, "dirty": dirty}


def git(directory: Path, *words: str, timeout: float = 10) -> str:
    """Return what git prints when it is called with `words` in `directory`.

    Raises:
        OSError: if git is missing.
        subprocess.SubprocessError: if it fails, or takes longer than `timeout` seconds.
    """
    # In a git hook, GIT_* variables refer to the repository of the hook.
    variables = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "-C", str(directory), *words]
    return subprocess.run(command, env=variables, capture_output=True, text=True, check=True, timeout=timeout).stdout


@functools.cache  # a process that trains several runs has imported them once
def versions() -> dict[str, Any]:
    """Return the versions of this project, Python, torch, CUDA, the system and `PACKAGES`; None for what is missing."""
    return {
        "runner": __version__,
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "torch": str(torch.__version__),
        **{name: next((each.version for each in metadata.distributions(name=name)), None) for name in PACKAGES},
        "cuda": torch.version.cuda,
        "os": platform.platform(),
    }


def devices(findings: list[str]) -> list[dict[str, Any]]:
    """Return the properties of the accelerators that torch finds; errors and warnings are appended to `findings`.

    The keys are `device`, such as `cuda:0`; `name`; `total_bytes` of memory; `capability`, None if the type has none;
    and on CUDA also `multiprocessors`.
    """
    found: list[dict[str, Any]] = []
    with collect_findings(findings, "devices"):
        kind = accelerator.accelerator_type()
        for index in range(torch.accelerator.device_count() if kind else 0):
            device = torch.device(f"{kind}:{index}")
            known = accelerator.properties(device)
            row = {
                "device": str(device),
                "name": getattr(known, "name", cpu()["model"]),
                "total_bytes": accelerator.total_bytes(device),
                "capability": f"{known.major}.{known.minor}" if hasattr(known, "major") else None,
            }
            if hasattr(known, "multi_processor_count"):
                row["multiprocessors"] = known.multi_processor_count
            found.append(row)
    return found


@contextmanager
def collect_findings(findings: list[str], what: str) -> Iterator[None]:
    """Append the first line of each error, which ends the context, or warning inside it to `findings`, after `what`."""
    with warnings.catch_warnings(record=True, action="always") as caught:
        try:
            yield
        except Exception as error:
            findings.append(f"{what}: {type(error).__name__}: {_first_line(error)}")
    findings += [f"{what}: {_first_line(warning.message)}" for warning in caught]


def _first_line(message: object) -> str:
    return str(message).strip().partition("\n")[0]
