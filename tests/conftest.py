"""Fixtures of all tests; what else they share is in `helpers`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from helpers.compose import FAST, Trained, built, train_in
from helpers.ranks import Ranks

torch.set_num_threads(1)  # tests run in several processes: more threads than cores wait for each other


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
