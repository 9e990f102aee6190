"""Finds out whether larger or smaller values of a metric are better."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress

from runner.analysis.saved_runs import MeasuredRun
from runner.config.schema import load_class

_LOWER_IS_BETTER = re.compile(r"loss|err|mae|mse|perplexity|seconds|time|memory", re.IGNORECASE)


def direction(metric: str, runs: Iterable[MeasuredRun]) -> str:
    """Return `max` if larger values of the metric with this TensorBoard tag are better, otherwise `min`.

    The direction is taken from the first of these sources that is available:

    1. A run that selects its best checkpoint by `metric`, and whose best value differs from its last value.
    2. The workload class of a run that selects its best checkpoint by `metric`, if the class can be loaded.
    3. The name of the metric: `min` for losses, errors, times and memory, otherwise `max`.
    """
    selected = [run for run in runs if run.best and run.best[0] == metric]
    for run in selected:
        assert run.best
        last = run.result["metrics"].get(metric)
        if last is not None and run.best[1] != last:
            return "max" if run.best[1] > last else "min"
    for run in selected[:1]:
        with suppress(Exception):  # the package of the workload may raise anything
            from runner.workloads.base import Workload

            name, best_is = load_class(run.config["workload"]["_target_"], Workload).best
            if metric == f"eval/{name}":
                return best_is
    return "min" if _LOWER_IS_BETTER.search(metric.rpartition("/")[2]) else "max"
