"""Checks that the evaluations of a workload measure the metrics that the workload names."""

from __future__ import annotations

from collections.abc import Collection

from runner.config.errors import ABSENT, ConfigError
from runner.workloads.base import Workload


def check_listed(workload: Workload) -> None:
    """Raise `ConfigError` unless `best` and `eval_metrics` of `workload` agree, and say `min` or `max`."""
    (metric, goal), listed = workload.best, workload.eval_metrics()
    if listed.get(metric) != goal or not {goal, *listed.values()} <= {"min", "max"}:
        why = f"best of {type(workload).__name__} is {(metric, goal)}, and its eval_metrics() returns {listed}"
        raise ConfigError("workload", ABSENT, why, "let both name the same metric, and say min or max of each")


def check_measured(workload: Workload, measured: Collection[str]) -> None:
    """Raise `ConfigError` unless an evaluation has measured every metric that `workload` names."""
    for metric in dict([workload.best]) | workload.eval_metrics():
        if metric not in measured:
            name = type(workload).__name__
            why = f"{name} names the metric {metric!r}, but its evaluations measure {', '.join(measured)}"
            raise ConfigError("workload", ABSENT, why, "correct best and eval_metrics(), or what summarize() returns")
