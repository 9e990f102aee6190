"""Finds out whether larger or smaller values of a metric are better."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from runner.config.schema import load_class
from runner.storage.saved_run import saved_config

_LOWER_IS_BETTER = re.compile(r"loss|err|mae|mse|perplexity|seconds|time|memory", re.IGNORECASE)


def direction(metric: str, results: Mapping[Path, dict[str, Any]]) -> str:
    """Return `max` if larger values of `metric` are better, otherwise `min`.

    The direction is taken from the first of these sources that is available:

    1. A run that selects its best checkpoint by `metric`, and whose best value differs from its last value: `max` if
       the best value is the larger one, otherwise `min`.
    2. The workload class of a run that selects its best checkpoint by `metric`, if the class can be loaded.
    3. The name of the metric: `min` for losses, errors, times and memory, otherwise `max`.

    Args:
        metric: the TensorBoard tag of the metric.
        results: the result of each run, by run directory.
    """
    selected = {path: result for path, result in results.items() if result.get("best", {}).get("metric") == metric}
    for result in selected.values():
        best, last = result["best"]["value"], result.get("metrics", {}).get(metric)
        if _is_finite(best) and _is_finite(last) and best != last:
            return "max" if best > last else "min"
    for path in list(selected)[:1]:
        with suppress(Exception):  # the package of the workload may raise anything
            from runner.workloads.base import Workload  # imported here, because it imports torch

            name, best_is = load_class(saved_config(path).values["workload"]["_target_"], Workload).best
            if metric == f"eval/{name}":
                return best_is
    return "min" if _LOWER_IS_BETTER.search(metric.rpartition("/")[2]) else "max"


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300  # not if nan
