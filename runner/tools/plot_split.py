"""A pipeline over `split_size`: what was measured, and what its bubble alone would cost."""

from __future__ import annotations

from dataclasses import dataclass

from runner.tools.plot_runs import Point, elsewhere
from runner.tools.plot_tables import shown

_SPLIT, _MICROS = "parallel.split_size", "parallel.num_micro_batches"


@dataclass(frozen=True)
class SplitCurve:
    """The points of one pipeline, by `split_size`.

    Args:
        label: what tells it from other pipelines.
        points: (samples in a micro-batch, point), rising.
        batch_size: samples that go through the pipeline together.
        stages: of the pipeline.
    """

    label: str
    points: list[tuple[int, Point]]
    batch_size: int
    stages: int

    @property
    def best(self) -> tuple[int, Point]:
        """The fastest."""
        return min(self.points, key=lambda pair: pair[1].seconds.mean)

    def slowdown(self, split_size: float) -> float:
        """(m + p − 1) / m of m micro-batches in p stages: the bubble of GPipe (Huang et al., 2019, section 2.3)."""
        micro_batches = self.batch_size / split_size
        return (micro_batches + self.stages - 1) / micro_batches

    @property
    def seconds_without_bubble(self) -> float:
        """What a step would take without its bubble, by the point that comes nearest to that.

        The theory knows nothing of what small micro-batches cost beside the bubble, so that it is a bound: scaled by
        any other point, measurements would lie below it.
        """
        return min(point.seconds.mean / self.slowdown(split_size) for split_size, point in self.points)


def split_curves(points: list[Point]) -> list[SplitCurve]:
    """The pipelines that were measured with several split sizes."""
    groups: dict[str, list[tuple[int, Point]]] = {}
    for point in points:
        if (split_size := split_size_of(point)) is not None:
            rest = {key: value for key, value in point.values.items() if key not in (_SPLIT, _MICROS, "parallel")}
            label = ", ".join(f"{key.removeprefix('parallel.')}={shown(value)}" for key, value in rest.items())
            groups.setdefault(label, []).append((split_size, point))
    curves = []
    for label, pairs in groups.items():
        if len({split_size for split_size, _ in pairs}) > 1:
            first = pairs[0][1]
            ordered = sorted(pairs, key=lambda pair: pair[0])
            curves.append(SplitCurve(label, ordered, _samples_together(first), _stages(first)))
    return curves


def split_size_of(point: Point) -> int | None:
    """Samples in a micro-batch of a pipeline; None for what is no pipeline, or leaves it to itself."""
    labels = point.runs[0].labels
    if isinstance(labels.get(_SPLIT), int):
        return labels[_SPLIT]
    micros = labels.get(_MICROS)
    return _samples_together(point) // micros if isinstance(micros, int) else None


def _samples_together(point: Point) -> int:
    labels = point.runs[0].labels
    return labels["batch_size"] // labels.get("accumulation.steps", 1)


def _stages(point: Point) -> int:
    """How many stages a pipeline had: as its config says, or one a process."""
    run = point.runs[0]
    told = run.labels.get("parallel.stages")
    return told if isinstance(told, int) else max(2, run.result.get("world_size", 2))


def best_pipelines(points: list[Point]) -> list[Point]:
    """Of the pipelines, the fastest of those that differ by nothing but the pipeline's own options."""
    groups: dict[str, list[Point]] = {}
    for point in points:
        if is_pipeline(point):
            groups.setdefault(repr(elsewhere(point)), []).append(point)
    return [min(group, key=lambda point: point.seconds.mean) for group in groups.values()]


def is_pipeline(point: Point) -> bool:
    """Whether the mode of `point` splits a batch into micro-batches that follow each other through its stages."""
    return _SPLIT in point.runs[0].labels
