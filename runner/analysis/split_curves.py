"""Run times of pipelines over `split_size`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from runner.analysis.comparison import STEP_SECONDS, Row
from runner.config.overrides import as_typed

SPLIT, _NUM_MICRO_BATCHES = "parallel.split_size", "parallel.num_micro_batches"


@dataclass(frozen=True)
class SplitCurve:
    """The measured rows of one pipeline by `split_size`, ascending; `batch_size` are the samples that are split."""

    label: str
    points: list[tuple[int, Row]]
    batch_size: int
    stages: int

    def slowdown(self, split_size: float) -> float:
        """Return the factor by which GPipe's bubble lengthens a step: (m + p − 1) / m (Huang et al., 2019, 2.3)."""
        return 1 + (self.stages - 1) * split_size / self.batch_size

    @property
    def seconds_without_bubble(self) -> float:
        """The estimated step time without a bubble: the largest for which the curve of GPipe is a lower bound."""
        return min(seconds_of(row) / self.slowdown(split_size) for split_size, row in self.points)


def split_curves(rows: Sequence[Row]) -> list[SplitCurve]:
    """Return the curves of the pipelines that were measured with several split sizes."""
    groups: dict[str, list[tuple[int, Row]]] = {}
    for row in rows:
        labels = row.runs[0].labels
        number = _count(labels.get(_NUM_MICRO_BATCHES))
        if size := _count(labels.get(SPLIT)) or (number and max(1, _batch_size(row) // number)):
            rest = {k: v for k, v in row.values.items() if k not in (SPLIT, _NUM_MICRO_BATCHES, "parallel")}
            label = ", ".join(f"{key.removeprefix('parallel.')}={as_typed(value)}" for key, value in rest.items())
            groups.setdefault(label, []).append((size, row))
    curves = []
    for label, pairs in groups.items():
        points = sorted(pairs, key=lambda pair: pair[0])
        if points[0][0] < points[-1][0]:
            run = pairs[0][1].runs[0]
            stages = _count(run.labels.get("parallel.stages")) or max(2, _count(run.result.get("world_size")))
            curves.append(SplitCurve(label, points, _batch_size(pairs[0][1]), stages))
    return curves


def seconds_of(row: Row) -> float:
    """Return the time of a step."""
    return row.measures[STEP_SECONDS].mean


def _batch_size(row: Row) -> int:
    labels = row.runs[0].labels
    return max(1, _count(labels.get("batch_size")) // max(1, _count(labels.get("accumulation.steps"))))


def _count(value: object) -> int:
    """Return a positive integer, which a config of somebody else may not have; 0 for anything else."""
    return value if type(value) is int and 0 < value < 10**12 else 0
