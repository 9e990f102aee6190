"""Functions that read the learning curves of runs from their event files, and average the curves over repeats."""

from __future__ import annotations

from dataclasses import dataclass

from runner.analysis.plot_runs import Point, Study
from runner.tracking.mean_std import Spread
from runner.tracking.scalar_reader import scalars

_MOST_RUNS = 120
"""The maximum number of runs whose event files are read. Reading one run takes a few milliseconds."""

_FEWEST_STEPS = 3


@dataclass(frozen=True)
class LearningCurve:
    """A metric over optimizer steps, averaged over the repeats of one setting.

    Args:
        point: the setting, as a point of a `Study`.
        steps: the optimizer steps, in ascending order.
        spreads: for each step, the mean and the standard deviation of the metric over the repeats.
    """

    point: Point
    steps: list[int]
    spreads: list[Spread]


def learning_curves(study: Study) -> tuple[str, list[LearningCurve]]:
    """Return the tag of a metric, and the learning curves of this metric.

    The metric is the first of these three that any run logged at 3 or more steps: `study.metric`, the training metric
    of the same name, the training loss. If there is none, for example because no run has event files, the tag and the
    list of curves are empty. In a large study, only the first points have curves (see `_first_points`).
    """
    metric = study.metric
    wanted = [metric, f"train/{metric.rpartition('/')[2]}", "train/loss"]
    read = {point: [scalars(run.directory, wanted) for run in point.runs] for point in _first_points(study)}
    longest = {tag: max((len(run.get(tag, {})) for runs in read.values() for run in runs), default=0) for tag in wanted}
    tag = next((tag for tag in wanted if longest[tag] >= _FEWEST_STEPS), "")
    averaged = (
        [_average(point, [run[tag] for run in runs if tag in run]) for point, runs in read.items()] if tag else []
    )
    return tag, [curve for curve in averaged if curve.steps]


def _first_points(study: Study) -> list[Point]:
    """Return the first points of a study: as many as possible, but with at most `_MOST_RUNS` runs in total."""
    points, count = [], 0
    for point in study.points:
        count += len(point.runs)
        if count <= _MOST_RUNS:
            points.append(point)
    return points


def _average(point: Point, runs: list[dict[int, float]]) -> LearningCurve:
    steps = sorted({step for run in runs for step in run})
    return LearningCurve(point, steps, [Spread.of(run[step] for run in runs if step in run) for step in steps])
