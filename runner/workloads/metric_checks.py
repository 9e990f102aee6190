"""Checks that the evaluations of a workload measure the metrics that the workload names."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress

import torch

from runner.config.errors import ABSENT, check
from runner.workloads.base import Workload

_NO_SAMPLES = (1, 1 << 40)
"""The second of very many shards, which has none of the samples."""


def check_listed(workload: Workload) -> None:
    """Check that `best` and `eval_metrics` of `workload` say `min` or `max` for each metric; called after `prepare`.

    Raises:
        ConfigError: if one of them has another value, or `eval_metrics` does not list the metric `best`.
    """
    name, (metric, goal), listed = type(workload).__name__, workload.best, workload.eval_metrics()
    for each, direction in (*listed.items(), (metric, goal)):
        why = f"{name} says {direction!r} for the metric {each!r}, where only min and max have a meaning"
        check(direction in ("min", "max"), "workload", ABSENT, why, f'for example best = ("{each}", "max")')
    why = f"the best checkpoint of {name} is that of ({metric!r}, {goal!r}), but its eval_metrics() returns {listed}"
    check(listed.get(metric) == goal, "workload", ABSENT, why, "let both name the same metric")


def check_measured(workload: Workload, measured: Collection[str]) -> None:
    """Check that an evaluation has measured every metric that `best` and `eval_metrics` of `workload` name.

    Raises:
        ConfigError: if a metric is missing in `measured`.
    """
    for metric in dict([workload.best]) | workload.eval_metrics():
        why = (
            f"{type(workload).__name__} names the metric {metric!r}, but its evaluations measure {', '.join(measured)}"
        )
        check(
            metric in measured, "workload", ABSENT, why, "correct best and eval_metrics(), or what summarize() returns"
        )


def check_without_samples(workload: Workload, device: torch.device) -> None:
    """Call `check_measured` before the first step, if an evaluation of no samples shows which metrics are measured.

    Only for a workload without `eval_metrics` of its own, whose metrics are listed nowhere else.

    Raises:
        ConfigError: if a metric is not measured.
    """
    if type(workload).eval_metrics is not Workload.eval_metrics:
        return
    measured: Mapping[str, float] = {}
    with suppress(Exception), torch.no_grad():  # the first evaluation will find out what it measures
        sums = workload.evaluate(_infer, _NO_SAMPLES, device)
        measured = workload.summarize({name: torch.ones_like(total) for name, total in sums.items()})
    if measured:
        check_measured(workload, measured)


def _infer(inputs: torch.Tensor) -> torch.Tensor:
    raise ValueError("there are no samples")
