"""The step time of a pipeline over `split_size`: the measurements, and a lower bound from the pipeline bubble."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from runner.analysis.comparison import STEP_SECONDS, Row
from runner.analysis.tables import format_value

_SPLIT, _NUM_MICRO_BATCHES = "parallel.split_size", "parallel.num_micro_batches"


@dataclass(frozen=True)
class SplitCurve:
    """The measured rows of one pipeline."""

    label: str
    """The values that distinguish this pipeline from other pipelines."""
    points: list[tuple[int, Row]]
    """Pairs (`split_size`, row), sorted by `split_size`, the number of samples in a micro-batch."""
    batch_size: int
    """The number of samples that are split into micro-batches."""
    stages: int

    @property
    def best(self) -> tuple[int, Row]:
        """The fastest point."""
        return min(self.points, key=lambda pair: pair[1].measures[STEP_SECONDS].mean)

    def slowdown(self, split_size: float) -> float:
        """Return the factor by which GPipe's bubble lengthens a step: (m + p − 1) / m for m micro-batches and p stages.

        See Huang et al., 2019, section 2.3.
        """
        micro_batches = self.batch_size / split_size
        return (micro_batches + self.stages - 1) / micro_batches

    @property
    def seconds_without_bubble(self) -> float:
        """The estimated step time of a pipeline without a bubble, in seconds.

        It is the smallest ratio of measured step time to theoretical slowdown. The theoretical curve is therefore a
        lower bound that touches the measurements. It ignores the overhead of small micro-batches.
        """
        return min(row.measures[STEP_SECONDS].mean / self.slowdown(split_size) for split_size, row in self.points)


def split_curves(rows: Sequence[Row]) -> list[SplitCurve]:
    """Return the curves of the pipelines that were measured with several split sizes."""
    groups: dict[str, list[tuple[int, Row]]] = {}
    for row in rows:
        labels = row.runs[0].labels
        size = _count(labels.get(_SPLIT))
        if number := _count(labels.get(_NUM_MICRO_BATCHES)):
            size = size or max(1, _batch_size(labels) // number)
        if size:
            rest = {k: v for k, v in row.values.items() if k not in (_SPLIT, _NUM_MICRO_BATCHES, "parallel")}
            label = ", ".join(f"{key.removeprefix('parallel.')}={format_value(value)}" for key, value in rest.items())
            groups.setdefault(label, []).append((size, row))
    curves = []
    for label, pairs in groups.items():
        if len({size for size, _ in pairs}) > 1:
            run = pairs[0][1].runs[0]
            stages = _count(run.labels.get("parallel.stages")) or max(2, _count(run.result.get("world_size")))
            points = sorted(pairs, key=lambda pair: pair[0])
            curves.append(SplitCurve(label, points, _batch_size(run.labels), stages))
    return curves


def fastest_pipelines(rows: Sequence[Row]) -> list[Row]:
    """Return the fastest pipeline of each group of pipelines that differ only in the options of the pipeline."""
    groups: dict[str, list[Row]] = {}
    for row in filter(is_pipeline, rows):
        groups.setdefault(row.other_values, []).append(row)
    return [min(group, key=lambda row: row.measures[STEP_SECONDS].mean) for group in groups.values()]


def is_pipeline(row: Row) -> bool:
    """Return whether the parallel mode of `row` is a pipeline."""
    return _SPLIT in row.runs[0].labels


def _batch_size(labels: dict[str, Any]) -> int:
    return max(1, _count(labels.get("batch_size")) // max(1, _count(labels.get("accumulation.steps"))))


def _count(value: object) -> int:
    """Return a positive integer, which a config of somebody else may not have; 0 for anything else."""
    return value if type(value) is int and 0 < value < 10**12 else 0
