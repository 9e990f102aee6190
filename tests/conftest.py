"""What all tests share: composing a run in this process, and running the command in another."""

from __future__ import annotations

import copy
import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf
from helpers.ranks import Ranks
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from runner.cli.arguments import quoted
from runner.config.options import CONF
from runner.run import Run, build_run
from runner.train import train

torch.set_num_threads(1)  # tests run beside each other: more threads than cores wait for each other in circles

ROOT = Path(__file__).parent.parent
FAST = ("model=tiny", "data.size=8", "device=cpu", "device.threads=1")
"""Overrides with which a step takes a millisecond."""


def composed(*overrides: str) -> dict[str, Any]:
    """The resolved config of a command line, as the command composes it."""
    return copy.deepcopy(_composed(overrides))


@functools.cache
def _composed(overrides: tuple[str, ...]) -> dict[str, Any]:
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("config", [quoted(text, sweep=False) for text in ("name=test", *overrides)])
    return OmegaConf.to_container(config, resolve=True)  # pyright: ignore[reportReturnType]


def built(*overrides: str) -> Run:
    """The run of a command line."""
    return build_run(composed(*overrides))


@pytest.fixture
def trained(tmp_path: Path) -> Callable[..., Run]:
    """Train a command line, in this process or in those of its mode; its directory and `run.result` tell the rest."""

    def train_it(*overrides: str, directory: str = "run") -> Run:
        run = built(*FAST, *overrides)
        run.prepare()
        run.directory = tmp_path / directory
        run.directory.mkdir(exist_ok=True)
        run.result = run.parallel.launch(train, run)  # pyright: ignore[reportAttributeAccessIssue]
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
    return subprocess.Popen(
        [sys.executable, "-m", "runner", *arguments], cwd=cwd, env=environment(), **(pipes | options)
    )


def command(*arguments: str, cwd: Path, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """`python -m runner ARGUMENTS` in `cwd`, to its end."""
    process = start(*arguments, cwd=cwd)
    out, err = process.communicate(timeout=timeout)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


EVERYTHING = """
import torch, runner.resume, runner.tracking.recorder, runner.train
torch.use_deterministic_algorithms(False)  # loads torch's compiler, as every optimizer does: two seconds
"""
NO_TORCH = """
sys.modules |= {"torch._C": None, "numpy": None}  # whoever imports them fails
"""
FORK_SERVER = """
import json, os, sys
exec(sys.argv[1])
from runner.__main__ import main
for line in sys.stdin:
    cwd, *sys.argv[1:] = json.loads(line)
    if (child := os.fork()) == 0:
        os.chdir(cwd)
        console = os.open("console.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(console, 1), os.dup2(console, 2)
        code = main()
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)  # an interpreter with torch takes a second to fall apart
    print(child, flush=True)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with open(cwd + "/code.part", "w") as file:
        print(code, file=file)
    os.replace(cwd + "/code.part", cwd + "/code")
"""


class Forks:
    """The command in children of one interpreter that has imported everything: a second each instead of four.

    Args:
        first: what the interpreter does before the command: import everything, or make sure that torch is not used.
    """

    def __init__(self, first: str = EVERYTHING) -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        program = [sys.executable, "-c", FORK_SERVER, first]
        self.server = subprocess.Popen(program, env=environment(), cwd="/", **pipes)

    def start(self, *arguments: str, cwd: Path) -> int:
        """Begin `python -m runner ARGUMENTS` in `cwd`; returns its process id. What it prints is in console.txt."""
        cwd.mkdir(exist_ok=True)
        (cwd / "code").unlink(missing_ok=True)
        print(json.dumps([str(cwd), *arguments]), file=self.server.stdin, flush=True)
        return int(self.server.stdout.readline())

    def code(self, cwd: Path) -> int | None:
        """The exit code of what was started in `cwd`; negative: the signal that killed it; None while it goes on."""
        return int((cwd / "code").read_text()) if (cwd / "code").exists() else None

    def run(self, *arguments: str, cwd: Path) -> tuple[int, str]:
        """The command to its end: exit code, and what it printed."""
        self.start(*arguments, cwd=cwd)
        while (code := self.code(cwd)) is None:
            time.sleep(0.005)
        return code, (cwd / "console.txt").read_text()


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    forks = Forks()
    with forks.server:
        yield forks
        forks.server.stdin.close()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """`ranks(3)`: three processes that one run after another can join; started when they are first asked for."""
    crews: dict[int, Ranks] = {}
    yield lambda count: crews.setdefault(count, Ranks(count))
    for crew in crews.values():
        crew.close()


def events(directory: Path) -> EventAccumulator:
    """What TensorBoard reads from a run directory, every point of it."""
    return EventAccumulator(str(directory), size_guidance=dict.fromkeys(("scalars", "images", "tensors"), 0)).Reload()


def curves(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """(step, value) of every scalar in a run directory, by tag."""
    read = events(directory)
    return {tag: [(point.step, point.value) for point in read.Scalars(tag)] for tag in read.Tags()["scalars"]}


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
