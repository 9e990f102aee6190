"""What all tests share: composing a run in this process, and running the command in another."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from runner.cli import quoted
from runner.config import CONF
from runner.run import Run, build_run
from runner.train import train

ROOT = Path(__file__).parent.parent
FAST = ("model=tiny", "data.size=8", "device=cpu", "device.threads=1")
"""Overrides with which a step takes a millisecond."""


def composed(*overrides: str) -> dict[str, Any]:
    """The resolved config of a command line, as the command composes it."""
    GlobalHydra.instance().clear()
    OmegaConf.register_new_resolver("started", lambda: "now", replace=True)
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("config", [quoted(text, sweep=False) for text in ("name=test", *overrides)])
    return OmegaConf.to_container(config, resolve=True)  # pyright: ignore[reportReturnType]


def built(*overrides: str) -> Run:
    """The run of a command line."""
    return build_run(composed(*overrides))


@pytest.fixture
def trained(tmp_path: Path) -> Callable[..., Run]:
    """Train a command line in this process; the run's directory and `run.result` tell the rest."""

    def train_it(*overrides: str, directory: str = "run") -> Run:
        run = built(*FAST, *overrides)
        run.prepare()
        run.directory = tmp_path / directory
        run.directory.mkdir(exist_ok=True)
        run.result = train(run)  # pyright: ignore[reportAttributeAccessIssue]
        return run

    return train_it


def environment() -> dict[str, str]:
    """For a child: this checkout, one thread, no terminal's habits."""
    drop = ("CI", "NO_COLOR", "FORCE_COLOR", "COLUMNS", "HYDRA_FULL_ERROR")
    kept = {name: value for name, value in os.environ.items() if name not in drop}
    return kept | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error::ResourceWarning"}


def start(*arguments: str, cwd: Path, **options: Any) -> subprocess.Popen[str]:
    """`python -m runner ARGUMENTS` in `cwd`, in the background."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-m", "runner", *arguments], cwd=cwd, env=environment(), **(pipes | options))


def command(*arguments: str, cwd: Path, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """`python -m runner ARGUMENTS` in `cwd`, to its end."""
    process = start(*arguments, cwd=cwd)
    out, err = process.communicate(timeout=timeout)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@pytest.fixture(autouse=True)
def _leave_torch_as_it_was() -> Iterator[None]:
    """Threads, determinism, the generator's state and the environment are not to leak from test to test."""
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), dict(os.environ)
    torch.manual_seed(0)
    yield
    after = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    assert after == before[:2], "a test, or what it tested, left torch's global switches changed"
    for name in set(os.environ) - set(before[2]) - {"PYTEST_CURRENT_TEST"}:
        os.environ.pop(name, None)
