"""Tests of lazy imports: importing loads nothing, and the first use, of any kind, loads the whole package once."""

from __future__ import annotations

import subprocess
import sys

import pytest
from helpers.command import child_environment
from helpers.lazy_uses import FIRST_USES


def use_lazily(name: str) -> None:
    """Run a function of `helpers.lazy_uses` in a process in which torch and torchvision are lazy."""
    words = [sys.executable, "-m", "helpers.lazy_uses", name]
    done = subprocess.run(words, env=child_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_lazy_import_loads_nothing() -> None:
    use_lazily("nothing")


SLOW = ("submodule", "unpickling")  # three seconds each


@pytest.mark.parametrize(
    "first_use",
    [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in FIRST_USES],
)
def test_the_first_use_loads_the_whole_package_once(first_use: str) -> None:
    use_lazily(first_use)


def test_the_deferred_compiler_is_loaded_at_its_first_use_and_works_as_usual() -> None:
    words = [sys.executable, "-m", "helpers.programs", "deferred_compiler"]
    done = subprocess.run(words, env=child_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
