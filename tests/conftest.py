"""Fixtures and hooks of all tests; other shared code is in `helpers`."""

# ruff: noqa: E402
import gc

gc.disable()  # until all tests are collected: importing torch takes a fifth longer with garbage collection

import importlib
import inspect
import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.command import child_environment, command_server
from helpers.command_server import fork_server_from_fork
from helpers.compose import TINY_CPU, TrainedRun, build_composed_run, train_in
from helpers.ranks import PersistentRanks, Ranks, ThisProcess

from runner.config import user_code
from runner.parallel.launch import processes
from runner.system.forkserver import start_server

if "gpu" not in sys.argv and "PYTEST_XDIST_WORKER" not in os.environ and Path("/dev/nvidiactl").exists():
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # tests are of the CPU, but for those that `-m gpu` selects
# The fork server starts without what pytest adds to sys.path.
os.environ["PYTHONPATH"] = child_environment()["PYTHONPATH"]
processes.PRELOADED = (*processes.PRELOADED, "helpers.preload_and_freeze")
# Here and in all forks, nothing waits for the disk, which takes a third of the time of some tests. A power loss is
# simulated from the calls (`helpers.power_loss`).
os.fsync = lambda file: None  # type: ignore[assignment]
importlib.import_module("torch._dynamo")  # the first optimizer would import it
importlib.import_module("helpers.preload_and_freeze")
torch.set_num_threads(1)  # tests run in several processes, which would have more threads than there are cores
for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, signal.SIG_DFL)  # a parent such as nohup may ignore them, which child processes inherit
signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore it in background processes


with warnings.catch_warnings():
    # Forks of this process need not import everything; they begin before it uses torch, whose threads they would lack.
    kept = [each for each in warnings.filters if each[0] not in ("error", "always")]  # without those of pytest
    warnings.filters[:] = kept  # pyright: ignore[reportIndexIssue]
    warnings.simplefilter("ignore", ImportWarning)
    command_server("ranks")
    with fork_server_from_fork():
        start_server(*processes.PRELOADED)

for logger in [*logging.root.manager.loggerDict.values()]:
    if isinstance(logger, logging.Logger):
        logger.propagate = True  # to each of torch's 57 that do not, pytest would add handlers six times a test

TESTS = Path(__file__).parent
COSTLY = (
    "parallel/launch/test_faults.py",
    "parallel/launch/test_processes.py",
    "faults/test_kills.py",
    "docs/test_suggestions.py",
    "sweeps/engines/test_slurm.py",
    "parallel/test_parity_modes.py",
    "verification/test_verify.py",
    "config/test_options.py",
    "system/test_console.py",
    "test_compiled_step.py",
    "test_run.py",
    "parallel/",
    "planning/",
    "faults/",
)
"""Files and folders of long tests. xdist starts with them, so that none of them runs alone at the end."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test marked `cases` once for each row, whose values are those of the first parameters of the test."""
    for mark in metafunc.definition.iter_markers("cases"):
        names, first = list(inspect.signature(metafunc.function).parameters), mark.args[0]
        row = first.values if hasattr(first, "values") and not isinstance(first, dict) else first
        count = len(row) if isinstance(row, tuple) else 1
        metafunc.parametrize(names[:count] if count > 1 else names[0], mark.args, **mark.kwargs)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        path = item.path.relative_to(TESTS).as_posix()
        return next((number for number, name in enumerate(COSTLY) if path.startswith(name)), len(COSTLY))

    if hasattr(config, "workerinput"):  # with xdist; a single process keeps the order of the files
        items.sort(key=place)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, Any, Any]:
    """Escape the bytes in a report that are not UTF-8, as of unusual file names, because xdist cannot send them."""
    report = yield
    report.sections = [(title, _utf8(text)) for title, text in report.sections]
    if report.longrepr is not None and (text := str(report.longrepr)) != _utf8(text):
        report.longrepr = _utf8(text)
    return report


def _utf8(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()


@pytest.fixture(scope="module", autouse=True)
def _collected_tests_are_no_garbage() -> None:
    """Save time: each run collects garbage, and would examine the objects of all collected tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def trained(tmp_path) -> Callable[..., TrainedRun]:
    """Return a function that trains a fast run with overrides, in this process or in those of its mode."""

    def train_it(*overrides: str, directory: str = "run") -> TrainedRun:
        return train_in(tmp_path / directory, build_composed_run(*TINY_CPU, *overrides))

    return train_it


@pytest.fixture
def elsewhere(tmp_path, monkeypatch) -> None:
    """Make the temporary directory of the test the current one."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Return a function: `ranks(3)` returns three persistent processes that train one run after another."""
    started: dict[int, PersistentRanks] = {1: ThisProcess(1)}
    yield lambda count: started.setdefault(count, PersistentRanks(count))
    for each in started.values():
        each.close()


@pytest.fixture(autouse=True)
def _leave_torch_as_it_was() -> Iterator[None]:
    """Threads, determinism, the generator's state, the environment and given code must not leak from test to test."""
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), dict(os.environ)
    # Without a device, `torch.manual_seed` keeps each call and its stack, which takes 2 ms.
    (torch.manual_seed if torch.accelerator.is_available() else torch.default_generator.manual_seed)(0)
    with user_code.using(user_code.given()):  # a command in this process gives the code that is typed
        yield
    after = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    assert after == before[:2], "a test, or what it tested, left torch's global switches changed"
    for name in set(os.environ) - set(before[2]) - {"PYTEST_CURRENT_TEST"}:
        os.environ.pop(name, None)
