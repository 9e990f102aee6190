"""Tests of the command `python -m runner` in a new process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.command import run_in_new_interpreter
from helpers.compose import TINY_CPU
from helpers.events import scalar_curves
from helpers.runs import only_run


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Return the finished process and its run directory."""
    cwd = tmp_path_factory.mktemp("here")
    return run_in_new_interpreter(cwd=cwd), only_run(cwd)


def test_it_learns_the_digits(finished):
    process, directory = finished
    assert process.returncode == 0, process.stderr
    result = json.loads((directory / "result.json").read_text())
    assert result["status"] == "done"
    assert result["metrics"]["eval/accuracy"] >= 0.98
    assert result["best"]["value"] >= result["metrics"]["eval/accuracy"]
    assert result["steps"] == 450  # 20 epochs of 1,438 samples, 64 per step


def test_it_writes_the_run_directory(finished):
    _, directory = finished
    names = {path.name for path in directory.iterdir()}
    assert {"config.yaml", "overrides.yaml", "environment.json", "checkpoints", "log.txt", "result.json"} <= names
    losses = [value for _, value in scalar_curves(directory)["train/loss"]]
    assert len(losses) == 9
    assert losses[-1] < 0.2 < losses[0]
    steps = {path.name for path in (directory / "checkpoints").iterdir()}
    best = json.loads((directory / "result.json").read_text())["best"]
    assert {"step_00000450", f"step_{best['step']:08d}"} <= steps
    assert len(steps) <= 3, "two of the latest, and the best"


def test_it_prints_where_its_results_are(finished):
    process, directory = finished
    assert "tensorboard --logdir outputs" in process.stdout.replace("'", "")
    assert str(directory.relative_to(directory.parents[2])) in process.stdout
    assert "best eval/accuracy" in process.stdout


def test_no_process_imports_a_module_of_the_current_directory(tmp_path: Path) -> None:
    """Nor do the ranks of a job of a sweep, which is forked from a server that is started by `python -c`."""
    for name in ("socket", "selectors", "pickle", "tempfile", "models", "torch"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')")
    ended = run_in_new_interpreter(*TINY_CPU, "-m", "seed=1", "parallel=ddp", "steps=2", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert not (tmp_path / "imported").exists()
