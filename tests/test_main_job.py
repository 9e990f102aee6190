"""Tests of the command `python -m runner` in a new process."""

import json

from helpers.command import run_in_new_interpreter
from helpers.events import scalar_curves
from helpers.runs import only_run


def test_the_default_run_learns_the_digits_writes_its_directory_and_prints_where_it_is(tmp_path):
    process = run_in_new_interpreter(cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    directory = only_run(tmp_path)
    names = {path.name for path in directory.iterdir()}
    assert {"config.yaml", "overrides.yaml", "environment.json", "checkpoints", "log.txt", "result.json"} <= names
    result = json.loads((directory / "result.json").read_text())
    assert (result["status"], result["steps"]) == ("done", 450)  # 20 epochs of 1,438 samples, 64 per step
    assert result["best"]["value"] >= result["metrics"]["eval/accuracy"] >= 0.98
    losses = [value for _, value in scalar_curves(directory)["train/loss"]]
    assert len(losses) == 9
    assert losses[-1] < 0.2 < losses[0]
    steps = {path.name for path in (directory / "checkpoints").iterdir()}
    assert {"step_00000450", f"step_{result['best']['step']:08d}"} <= steps
    assert len(steps) <= 3, "two of the latest, and the best"
    assert "tensorboard --logdir outputs" in process.stdout.replace("'", "")
    assert str(directory.relative_to(tmp_path)) in process.stdout
    assert "best eval/accuracy" in process.stdout
