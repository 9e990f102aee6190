"""The step time of a pipeline over `split_size`: the measurements, and a lower bound from the pipeline bubble."""

from __future__ import annotations

from dataclasses import dataclass

from runner.analysis.plot_runs import Point, other_values
from runner.analysis.plot_tables import format_value

_SPLIT, _NUM_MICRO_BATCHES = "parallel.split_size", "parallel.num_micro_batches"


@dataclass(frozen=True)
class SplitCurve:
    """The measured points of one pipeline, in the order of their `split_size`.

    Args:
        label: the values that distinguish this pipeline from other pipelines.
        points: pairs (`split_size`, point), sorted by `split_size`. A split size is the number of samples in a
            micro-batch.
        batch_size: number of samples that are split into micro-batches.
        stages: number of stages.
    """

    label: str
    points: list[tuple[int, Point]]
    batch_size: int
    stages: int

    @property
    def best(self) -> tuple[int, Point]:
        """The fastest point, as a pair (`split_size`, point)."""
        return min(self.points, key=lambda pair: pair[1].seconds.mean)

    def slowdown(self, split_size: float) -> float:
        """Return the factor by which GPipe's bubble lengthens a step: (m + p − 1) / m for m micro-batches and p stages.

        See Huang et al., 2019, section 2.3.
        """
        micro_batches = self.batch_size / split_size
        return (micro_batches + self.stages - 1) / micro_batches

    @property
    def seconds_without_bubble(self) -> float:
        """The estimated step time of a pipeline without a bubble, in seconds.

        The estimate is the smallest ratio of measured step time to theoretical slowdown. The theoretical curve is
        therefore a lower bound: it goes through at least one measured point, and no measured point lies below it.
        Points may lie above the curve, because the theory ignores the overhead of small micro-batches.
        """
        return min(point.seconds.mean / self.slowdown(split_size) for split_size, point in self.points)


def split_curves(points: list[Point]) -> list[SplitCurve]:
    """Return the curves of the pipelines that were measured with several split sizes."""
    groups: dict[str, list[tuple[int, Point]]] = {}
    for point in points:
        if (split_size := split_size_of(point)) is not None:
            rest = {
                key: value for key, value in point.values.items() if key not in (_SPLIT, _NUM_MICRO_BATCHES, "parallel")
            }
            label = ", ".join(f"{key.removeprefix('parallel.')}={format_value(value)}" for key, value in rest.items())
            groups.setdefault(label, []).append((split_size, point))
    curves = []
    for label, pairs in groups.items():
        if len({split_size for split_size, _ in pairs}) > 1:
            first = pairs[0][1]
            ordered = sorted(pairs, key=lambda pair: pair[0])
            curves.append(SplitCurve(label, ordered, _pipeline_batch_size(first), _stages(first)))
    return curves


def split_size_of(point: Point) -> int | None:
    """Return the number of samples in a micro-batch; None if `point` is not a pipeline, or the size is automatic."""
    labels = point.runs[0].labels
    if isinstance(labels.get(_SPLIT), int):
        return labels[_SPLIT]
    num_micro_batches = labels.get(_NUM_MICRO_BATCHES)
    return max(1, _pipeline_batch_size(point) // num_micro_batches) if isinstance(num_micro_batches, int) else None


def _pipeline_batch_size(point: Point) -> int:
    labels = point.runs[0].labels
    return max(1, labels["batch_size"] // labels.get("accumulation.steps", 1))  # at least 1 in every run that is done


def _stages(point: Point) -> int:
    """Return the number of stages that the config gives.

    If the config gives none, return the number of processes, but at least 2.
    """
    run = point.runs[0]
    stages = run.labels.get("parallel.stages")
    return stages if isinstance(stages, int) else max(2, run.result.get("world_size", 2))


def best_pipelines(points: list[Point]) -> list[Point]:
    """Return the fastest pipeline of each group of pipelines that differ only in the options of the pipeline."""
    groups: dict[str, list[Point]] = {}
    for point in points:
        if is_pipeline(point):
            groups.setdefault(repr(other_values(point)), []).append(point)
    return [min(group, key=lambda point: point.seconds.mean) for group in groups.values()]


def is_pipeline(point: Point) -> bool:
    """Return whether the parallel mode of `point` is a pipeline."""
    return _SPLIT in point.runs[0].labels
