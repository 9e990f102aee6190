"""The metrics by which runs are compared, and whether large or small values of each are better."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress

from runner.analysis.output import one_line
from runner.analysis.saved_runs import MeasuredRun
from runner.config.errors import ConfigError, check, did_you_mean
from runner.config.schema import load_class
from runner.result import MEASURED

_LOWER_IS_BETTER = re.compile(r"loss|err|mae|mse|perplexity|bits|disagreement|seconds|time|memory", re.IGNORECASE)
_HIGHER_IS_BETTER = re.compile(r"acc|return|reward|r2|f1|auc|precision|recall", re.IGNORECASE)


def chosen_metrics(
    runs: list[MeasuredRun], metric: str | None, goals: dict[str, str], goal: str | None
) -> tuple[dict[str, str], str]:
    """Return the `metrics` and the text that is `meant` of a `Comparison`; `goals` are those that the sweeps name."""
    is_tag = any(metric in run.metrics for run in runs)
    names = [*goals] or ([metric] if metric is None or is_tag else metric.split(","))
    found = [(name, *_matching_metrics(runs, name)) for name in names]
    tags = [tag for _, tag, *_ in found]
    check(len({*tags}) == len(tags), "--metric", metric, "a metric is in it twice", "leave one out")
    meant = []
    for name, tag, *others in found:
        more = "".join(f"; for {other}, type --metric {other}" for other in others)
        meant += [] if name in (None, tag) else [one_line(f"--metric {name} is {tag}{more}")]
    if goal is not None:
        typed, why = goal.split(","), f"it must be min or max for each of {', '.join(tags)}"
        check(len(typed) == len(tags) and {*typed} <= {"min", "max"}, "--goal", goal, why, "--goal max,min for two")
        goals = dict(zip(tags, typed, strict=True))
    directions = {tag: goals.get(tag) or direction(tag, runs) for tag in tags}
    text = "Whether a high {} is good is not known, and a high one is taken for better: --goal min"
    meant += [one_line(text.format(tag)) for tag, is_best in directions.items() if tag and is_best is None]
    return {tag: is_best or "max" for tag, is_best in directions.items()}, "\n".join(meant)


def _matching_metrics(runs: list[MeasuredRun], name: str | None) -> list[str]:
    """Return the tag of the metric `name`, and the other tags that it may mean; see `Comparison`."""
    best = Counter(run.best[0] for run in runs if run.best)
    tags = sorted({*best, *(tag for run in runs for tag in (run.metrics if name else run.result["metrics"]))})
    tags.sort(key=lambda tag: tag[:5] != "eval/")
    if name is None:
        tags.sort(key=lambda tag: -best[tag])
        return [next(iter(tags), "")]
    if name in tags:
        return [name]
    if found := [tag for tag in tags if tag.rpartition("/")[2] == name]:
        return found
    raise ConfigError("--metric", name, "no run that is done has a finite value of it;", did_you_mean(name, tags))


def direction(metric: str, runs: Iterable[MeasuredRun]) -> str | None:
    """Return `max` or `min` if larger or smaller values of the metric with this TensorBoard tag are better, or None.

    A run that selects its best checkpoint by `metric` tells it: by a best value that differs from the last one, or by
    the class of its workload. Otherwise, the name of the metric may.
    """
    if metric in MEASURED:
        return MEASURED[metric]
    selected = [(run, run.best[1]) for run in runs if run.best and run.best[0] == metric]
    for run, best in selected:
        if (last := run.metrics.get(metric, best)) != best:
            return "max" if best > last else "min"
    with suppress(Exception):  # the package of the workload may raise anything
        from runner.workloads.base import Workload

        options = selected[0][0].config["workload"]
        name, best_is = load_class(options["_target_"], Workload).best_for(options)
        if metric == f"eval/{name}":
            return best_is
    from runner.workloads.named_metrics import OF_CLASSES_OR_NUMBERS  # imports torch

    name = metric.rpartition("/")[2]
    if name in OF_CLASSES_OR_NUMBERS:
        return OF_CLASSES_OR_NUMBERS[name].goal
    is_known = _HIGHER_IS_BETTER.search(name)
    return "min" if _LOWER_IS_BETTER.search(name) else "max" if is_known else None
