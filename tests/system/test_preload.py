"""Tests of the garbage collector in the children of a fork server."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from helpers.command import child_environment

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
