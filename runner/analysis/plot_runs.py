"""A study of saved runs: the runs are grouped into points by the values of the swept keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from runner.analysis.saved_runs import MeasuredRun, common_metric, grouped, swept_keys
from runner.sweep.ledger_reader import read_ledger
from runner.tracking.mean_std import Spread


@dataclass(frozen=True, eq=False)
class Point:
    """The repeats of one measurement: runs that differ only in their seed.

    Args:
        values: the values of the swept keys; a key that the configs of these runs do not have is left out.
        runs: the runs, one for each repeat.
        metric: the tag of the metric (see `Study`).
    """

    values: dict[str, Any]
    runs: tuple[MeasuredRun, ...]
    metric: str

    @property
    def mode(self) -> str:
        """The parallel mode of the runs."""
        return self.runs[0].mode

    @property
    def seconds(self) -> Spread:
        """The median step time of a run in seconds: mean and standard deviation of the medians over the repeats."""
        return Spread.of(run.seconds for run in self.runs)

    @property
    def samples_per_second(self) -> Spread:
        """The throughput in samples per second: mean and standard deviation over the repeats."""
        return Spread.of(run.samples_per_second for run in self.runs)

    @property
    def final(self) -> Spread | None:
        """The study's metric at the end of a run: mean and standard deviation over the repeats.

        None if no run has this metric.
        """
        metrics = [run.result.get("metrics", {}) for run in self.runs]
        values = [values[self.metric] for values in metrics if self.metric in values]
        return Spread.of(values) if values else None


class Study:
    """The points to plot for a set of runs, and the runs that failed.

    Args:
        runs: all runs, including failed runs.

    Attributes:
        failed: the runs that are excluded from the points.
        unfinished: the ledgers of sweeps that are not complete, by directory.
        keys: the swept keys (see `swept_keys`).
        metric: the tag of the metric; empty if no run has any metric.
        machines: descriptions of the machines on which the runs of the points were trained.
        points: the points, in the order of the runs.
    """

    def __init__(self, runs: list[MeasuredRun]):
        self.runs = runs
        self.failed = [run for run in runs if run.failure]
        counted = [run for run in runs if not run.failure]
        ledgers = {path: read_ledger(path) for path in sorted({run.directory.parent for run in runs})}
        self.unfinished = {path: ledger for path, ledger in ledgers.items() if ledger and not ledger.get("complete")}
        self.keys = swept_keys(runs)
        self.metric = common_metric(counted)
        self.machines = sorted({run.machine for run in counted})
        self.points = [
            Point({key: group[0].labels[key] for key in self.keys if key in group[0].labels}, tuple(group), self.metric)
            for group in grouped(counted, self.keys)
        ]

    def single(self, point: Point) -> Point | None:
        """Return the point with the parallel mode `single` that has the same values of all other swept keys as `point`.

        The options of the parallel mode are not compared. Return None unless there is exactly one such point.
        """
        values = other_values(point)
        matching = [each for each in self.points if each.mode == "single" and other_values(each) == values]
        return matching[0] if len(matching) == 1 else None


def other_values(point: Point) -> dict[str, Any]:
    """Return the values of the swept keys of `point`, without the parallel mode and its options."""
    return {key: value for key, value in point.values.items() if key.partition(".")[0] != "parallel"}
