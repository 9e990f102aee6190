"""Fixtures of all tests; what else they share is in `helpers`."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.compose import FAST, Trained, built, train_in
from helpers.ranks import Ranks

torch.set_num_threads(1)  # tests run in several processes: more threads than cores wait for each other
for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, signal.SIG_DFL)  # the shell may have them ignored, as nohup does, and children inherit that


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, Any, Any]:
    """Escape what is not UTF-8 in reports, which xdist could not send: tests use such names of files."""
    report = yield
    report.sections = [(title, _utf8(text)) for title, text in report.sections]
    if report.longrepr is not None and (text := str(report.longrepr)) != _utf8(text):
        report.longrepr = _utf8(text)
    return report


def _utf8(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()


@pytest.fixture
def trained(tmp_path: Path) -> Callable[..., Trained]:
    """Train a fast run of a command line, in this process or in those of its mode."""

    def train_it(*overrides: str, directory: str = "run") -> Trained:
        return train_in(tmp_path / directory, built(*FAST, *overrides))

    return train_it


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """`ranks(3)`: three processes in which one run after another can be joined; started when first asked for."""
    started: dict[int, Ranks] = {}
    yield lambda count: started.setdefault(count, Ranks(count))
    for each in started.values():
        each.close()


@pytest.fixture(autouse=True)
def _leave_torch_as_it_was() -> Iterator[None]:
    """Threads, determinism, the generator's state and the environment must not leak from test to test."""
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), dict(os.environ)
    torch.manual_seed(0)
    yield
    after = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    assert after == before[:2], "a test, or what it tested, left torch's global switches changed"
    for name in set(os.environ) - set(before[2]) - {"PYTEST_CURRENT_TEST"}:
        os.environ.pop(name, None)
