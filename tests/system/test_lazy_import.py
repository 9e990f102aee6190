"""Tests of lazy imports: importing loads nothing, and the first use, of any kind, loads the whole package once."""

import pytest
from helpers.command import run_program
from helpers.programs import FIRST_USES

FAST = ("submodule_of_the_other_package",)  # three seconds each


@pytest.mark.parametrize(
    "first_use", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in FIRST_USES]
)
def test_a_lazy_import_loads_nothing_and_the_first_use_loads_the_whole_package_once(first_use):
    done = run_program("import_lazily", first_use)
    assert done.returncode == 0, done.stderr


def test_the_deferred_compiler_is_loaded_at_its_first_use_and_works_as_usual():
    done = run_program("deferred_compiler")
    assert done.returncode == 0, done.stderr
