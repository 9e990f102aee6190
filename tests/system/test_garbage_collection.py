"""Tests of when garbage is collected, and which objects are excluded from collections."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.command import child_environment

from runner.system.garbage_collection import collection_postponed


@pytest.fixture(autouse=True)
def enabled_afterwards() -> Iterator[None]:
    yield
    gc.enable()


class Cycle:
    def __init__(self) -> None:
        self.itself = self


def test_garbage_is_collected_afterwards_but_existing_objects_are_excluded() -> None:
    before = gc.get_freeze_count()
    with collection_postponed():
        assert not gc.isenabled()
        imported = [[] for _ in range(10_000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() > before + len(imported)
    assert not any(each is imported for each in gc.get_objects())
    cycles = [Cycle() for _ in range(3)]
    cycles.clear()
    assert gc.collect() >= 3


def test_collection_stays_disabled_if_it_was_and_is_enabled_again_after_an_error() -> None:
    with pytest.raises(ImportError), collection_postponed():
        raise ImportError
    assert gc.isenabled()
    gc.disable()
    with collection_postponed():
        pass
    assert not gc.isenabled()


PROGRAM = """
from runner.system.forkserver import run_in_child, start_server
from helpers.report_gc import report_gc_state
if __name__ == "__main__":
    start_server("helpers.report_gc")
    run_in_child(report_gc_state, "found.json")
"""


def test_fork_server_children_collect_garbage_but_exclude_imported_objects(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], cwd=tmp_path, env=child_environment(), check=True, timeout=300)
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["while importing"] is False
    assert found["enabled"] is True
    assert found["frozen"] > 5_000
