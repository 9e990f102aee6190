"""Tests of the plan that a run logs to TensorBoard together with its measurements."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.compose import TINY_CPU
from helpers.dry_run import run_in_this_process
from helpers.events import load_events
from helpers.runs import only_run

from runner.api import run_job
from runner.planning import logged_plan
from runner.planning.formatting import milliseconds, significant, size


def trained(cwd: Path, *arguments: str) -> Path:
    code, console = run_in_this_process([*TINY_CPU, "steps=3", "eval_every=0", *arguments], cwd)
    assert code == 0, console
    return only_run(cwd)


def plans(run: Path) -> list[tuple[int, str]]:
    """The step and the text of each plan in TensorBoard."""
    read = load_events(run)
    tags = [tag for tag in read.Tags()["tensors"] if tag.startswith(logged_plan.TAG)]
    return [(each.step, each.tensor_proto.string_val[0].decode()) for tag in tags for each in read.Tensors(tag)]


@pytest.fixture
def every_run_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_job, "_PLANNED_SECONDS", 0.0)


@pytest.mark.usefixtures("every_run_is_long")
@pytest.mark.parametrize("mode", ["single", "ddp"])
def test_a_run_logs_its_plan_with_its_measurements(mode: str, tmp_path: Path) -> None:
    run = trained(tmp_path, f"parallel={mode}")
    result = json.loads((run / "result.json").read_text())
    [(step, text)] = plans(run)
    assert step == 4, "after the last point of the curves"
    assert size(result["peak_memory_bytes"]) in text
    assert f"{milliseconds(result['step_seconds']['median'])} in the median" in text
    assert f"{significant(result['samples_per_second'])} samples/s" in text
    [checkpoint] = (run / "checkpoints").glob("step_*")
    assert size(sum(file.stat().st_size for file in checkpoint.iterdir())) in text
    assert read_curves(run)["train/loss"] == [3]


def read_curves(run: Path) -> dict[str, list[int]]:
    read = load_events(run)
    return {tag: [point.step for point in read.Scalars(tag)] for tag in read.Tags()["scalars"]}


@pytest.mark.usefixtures("every_run_is_long")
def test_a_resumed_run_logs_another_plan_only_if_it_trains_further(tmp_path: Path) -> None:
    run = trained(tmp_path)
    for steps in (3, 5, 5):
        assert run_in_this_process([f"resume={run}", f"steps={steps}"], tmp_path)[0] == 0
    assert [step for step, _ in plans(run)] == [4, 6]
    assert read_curves(run)["train/loss"] == [3, 5]


def test_a_run_of_less_than_a_minute_logs_no_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_job, "_PLANNED_SECONDS", 1e9)  # however slow this machine is
    assert not plans(trained(tmp_path))


@pytest.mark.usefixtures("every_run_is_long")
def test_a_run_without_tensorboard_logs_no_plan(tmp_path: Path) -> None:
    run = trained(tmp_path, "tracking=csv")
    assert not list(run.glob("events.out.*"))


@pytest.mark.usefixtures("every_run_is_long")
@pytest.mark.parametrize("error", [RuntimeError("no plan"), KeyboardInterrupt()])
def test_a_failed_plan_does_not_fail_the_run(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(logged_plan, "trace", fail)
    run = trained(tmp_path)
    assert not plans(run)
    assert type(error).__name__ in (run / "log.txt").read_text()
    assert json.loads((run / "result.json").read_text())["status"] == "done"
