"""Tests that a workload which does not measure what it names is refused in words, at the latest when it evaluates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.compose import TINY_CPU, build_composed_run, prepare_session

from runner.config.errors import ConfigError
from runner.run import Run
from runner.training import train
from runner.workloads.base import Workload
from runner.workloads.classifier import Classifier


def run_of(workload: type[Classifier], *overrides: str) -> Run:
    """Return a run whose workload has the class `workload`."""
    run = build_composed_run(*TINY_CPU, "steps=4", "eval_every=4", "log_every=4", *overrides)
    run.workload.__class__ = workload
    return run


@dataclass
class WrongGoal(Classifier):
    best = ("accuracy", "maximum")


@dataclass
class OtherGoal(Classifier):
    best = ("accuracy", "min")


@pytest.mark.parametrize("workload", [WrongGoal, OtherGoal])
def test_goals_that_are_not_min_or_max_are_refused_before_the_run(workload: type[Classifier]) -> None:
    with pytest.raises(ConfigError) as refusal:
        prepare_session(run_of(workload))
    assert refusal.value.key == "workload"
    assert workload.__name__ in refusal.value.why


@dataclass
class NotMeasured(Classifier):
    best = ("recall", "max")
    eval_metrics = Workload.eval_metrics


@dataclass
class TooManyMetrics(Classifier):
    metrics = ("loss",)


@dataclass
class WrongSums(Classifier):
    def loss(self, model: torch.nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        loss = super().loss(model, batch)[0]
        return loss, loss.detach() * len(batch.inputs)


FAULTS: dict[type[Classifier], tuple[int, str]] = {
    NotMeasured: (4, "NotMeasured names the metric 'recall', but its evaluations measure loss, accuracy"),
    TooManyMetrics: (0, "its metric sums have the shape [2], but its metrics are loss"),
    WrongSums: (0, "its metric sums have the shape [], but its metrics are loss, accuracy"),
}


@pytest.mark.parametrize("workload", FAULTS)
def test_metrics_that_do_not_fit_are_refused_in_words(
    workload: type[Classifier], tmp_path: Path, trained_steps: Callable[[], int]
) -> None:
    run = run_of(workload)
    session = prepare_session(run)
    with pytest.raises(ConfigError) as refusal:
        train(run, session, tmp_path)
    assert refusal.value.key == "workload"
    assert (trained_steps(), refusal.value.why) == FAULTS[workload]


@pytest.fixture
def trained_steps(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Return a function that returns the number of optimizer steps so far."""
    steps: list[int] = []
    monkeypatch.setattr(Classifier, "after_step", lambda workload, model, step: steps.append(step))
    return lambda: len(steps)
