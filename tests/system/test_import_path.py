"""Tests that all processes of a run import the same copy of the project, wherever another copy lies."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.command import ROOT, child_environment

DDP = ("parallel=ddp", "model=tiny", "data.size=8", "steps=2", "device=cpu")


@pytest.fixture
def other_copy(tmp_path: Path) -> Path:
    """A directory with a package of the same name, which ends any process that imports it."""
    package = tmp_path / "other" / "runner"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('the other copy')\n")
    return package.parent


def assert_trains(words: list[str], cwd: Path, python_path: str, output_root: Path) -> None:
    variables = child_environment(PYTHONPATH=python_path)
    variables.pop("PYTHONSAFEPATH", None)
    done = subprocess.run(words, cwd=cwd, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    [result] = output_root.glob("*/*/result.json")
    assert json.loads(result.read_text())["world_size"] == 2


def test_ranks_import_the_copy_of_the_command_and_not_one_on_the_import_path(other_copy: Path, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "runner", *DDP, f"output_root={tmp_path}/out"]
    assert_trains(words, ROOT, str(other_copy), tmp_path / "out")


def test_ranks_import_the_copy_of_a_script_and_not_one_in_the_working_directory(
    other_copy: Path, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    overrides = [*DDP, f"output_root={tmp_path}/out"]
    script.write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\nimport runner\nrunner.train({overrides!r})\n")
    assert_trains([sys.executable, str(script)], other_copy, "", tmp_path / "out")
