"""A comparison of saved runs: a row for each combination of options, and a failure for each run that is not done."""

from __future__ import annotations

import math
import os
import re
import statistics
import sys
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from runner.analysis.metrics import chosen_metrics
from runner.analysis.output import one_line
from runner.analysis.saved_runs import MeasuredRun, find_runs_and_sweeps, is_locked, swept_keys
from runner.analysis.significance import Contrast, contrast, corrected
from runner.config.errors import ConfigError, check, did_you_mean
from runner.config.overrides import as_typed, override_key
from runner.result import MEASURED
from runner.storage.ledger_file import read_ledger
from runner.system.secrets import printable, redacted

BEST, LAST, STEPS, SECONDS, STEP_SECONDS, RATE = MEASURES = (
    *("best", "last"),  # the best and the last value of the metric
    *("steps", "seconds", "step_seconds", "samples_per_second"),
)

_REASONS = {"killed": "it was killed: it has no result", "damaged": "its result.json is damaged"}


class Spread(NamedTuple):
    """The mean and the sample standard deviation of repeated measurements; for a single value, `deviation` is NaN."""

    mean: float
    deviation: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Return the mean and the sample standard deviation of one or more `values`."""
        values = list(values)
        return cls(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else math.nan)

    def __str__(self) -> str:
        """Return `mean ± deviation` with two significant digits of the deviation, but at most five of the mean."""
        if math.isnan(self.deviation):
            return f"{self.mean:.4g}"
        largest = max(self.deviation, abs(self.mean) / 1000)
        digits = max(0, 1 - math.floor(math.log10(largest))) if largest else 1
        return f"{self.mean:.{digits}f} ± {self.deviation:.{digits}f}"


@dataclass(frozen=True)
class Row:
    """Runs that are done and differ only in their seed.

    `values` are those of the keys in which the compared runs differ, by dotted key; `measures`, by the names in
    `MEASURES` or the tags of several metrics, have the spread over the runs that have them.
    """

    values: dict[str, Any]
    runs: list[MeasuredRun]
    measures: dict[str, Spread]

    @property
    def seeds(self) -> int:
        """The number of different seeds; smaller than the number of runs if some of the runs have the same seed."""
        return len(set(map(_seed, self.runs)))

    @property
    def options(self) -> list[str]:
        """The values as the user types them: `optimizer.lr=0.1`."""
        return [printable(f"{key}={as_typed(value)}") for key, value in self.values.items()]

    @property
    def other_values(self) -> str:
        """The values of the keys that have nothing to do with the parallel mode, as text."""
        return repr({key: value for key, value in self.values.items() if key.partition(".")[0] != "parallel"})


class Failure(NamedTuple):
    """A run that is not done, or a job that is not done and has no run directory.

    `values` are as in `Row`; `run` is the path as `Comparison.name` shows it; `state` is that of the run, or `refused`,
    `queued` or `pruned`; `step` is the number of completed steps, if it is known; `reason` may be empty.
    """

    values: dict[str, Any]
    run: str
    state: str
    step: int | None
    reason: str


class Comparison:
    """The rows of a table that compares all runs below `paths`.

    Args:
        paths: directories that are, or contain at any depth, runs and sweeps.
        metric: the TensorBoard tag of the metric to compare, or its last part, of which `eval/` is preferred; or
            several with commas between them; None for those of the sweeps, if they all name the same, or for the metric
            by which most runs choose the best checkpoint, or else any.
        against: the row with which the others are compared: some of its options, as `KEY=VALUE,KEY=VALUE`, or the
            directory of one of its runs; None for the best one of those with several seeds.
        goal: whether `min` or `max` of each metric is better, with commas between them; None: what the sweeps name or
            `runner.analysis.metrics.direction` returns.

    Attributes:
        runs: all runs, whether they are done or not.
        keys: the config keys in which any of the runs differ (see `swept_keys`).
        metrics: for the tag of each metric, `max` if its larger values are better, otherwise `min`.
        metric, direction: the tag of the first metric, empty if no run that is done has any, and its `max` or `min`.
        meant: for each metric that was named by its last part, a line that says which tag was taken; or a line with the
            metrics of the sweeps that no run has.
        measures: the measures that at least one row has.
        rows: the rows of the runs that are done, sorted by `quality`: the best or the fastest first; those on the front
            before all others.
        front: of several metrics the Pareto front: the rows to which no other row is equal or better in each metric,
            and better in one. Rows with fewer seeds than others, or of which a run lacks a metric, are not on it.
        failures: all other runs, and the jobs that have no run directory, sorted by name.
        ledgers: the ledgers of the sweeps, by directory.

    Raises:
        ConfigError: if there are no runs, no run that is done has `metric`, `against` is not one row or is given with
            several metrics, or `goal` is not that of each metric.
    """

    def __init__(
        self, paths: list[Path], metric: str | None = None, against: str | None = None, goal: str | None = None
    ):
        self.runs, sweeps = find_runs_and_sweeps(paths)
        runs = self.runs
        self.ledgers = {path: ledger for path in sweeps if (ledger := read_ledger(path))}
        parents = {*(run.directory.absolute().parent for run in runs), *(path.absolute() for path in self.ledgers)}
        self._base = Path(os.path.commonpath(parents or {Path.cwd()}))
        self.keys = swept_keys(
            [run.labels for run in runs], {override_key(text) for run in runs for text in run.overrides}
        )
        done = [run for run in runs if run.state == "done" and run.labels]
        pruned = {
            path.absolute() / str(entry.get("directory"))
            for path, ledger in self.ledgers.items()
            for entry in ledger["jobs"].values()
            if entry.get("state") == "pruned"
        }
        failed = [self._failure(run, pruned) for run in runs if run.state != "done" or not run.labels]
        failed += [job for path, ledger in self.ledgers.items() for job in self._jobs_without_run(path, ledger)]
        remedy = "name a run directory, a sweep, or a directory with some below it"
        check(bool(runs or failed), "PATH", " ".join(map(str, paths)), "it contains no run", remedy)
        self.failures = sorted(failed, key=lambda failure: failure.run)
        of_sweeps = {} if metric else self._metrics_of_sweeps(done)
        self.metrics, self.meant = chosen_metrics(done, metric, of_sweeps, goal)
        if lacking := [] if metric else [tag for tag in self._named_by_sweeps() if tag not in of_sweeps]:
            self.meant = f"The sweep is to be compared by {one_line(', '.join(lacking))}, of which no run has a value."
        self._ranking = (LAST, BEST) if of_sweeps else (BEST, LAST)
        self.metric, is_one = next(iter(self.metrics)), len(self.metrics) == 1
        self.direction = self.metrics[self.metric]
        self._names = [*MEASURES] if is_one else [*self.metrics, *MEASURES[2:]]
        remedy = f"name one: --metric {self.metric}"
        check(is_one or against is None, "--against", against, "rows are compared with one by one metric", remedy)
        groups: dict[str, list[MeasuredRun]] = {}
        for run in done:
            groups.setdefault(repr([run.labels.get(key) for key in self.keys]), []).append(run)
        rows = [self._row(group) for group in groups.values()]
        self.measures = [name for name in self._names if any(name in row.measures for row in rows)]
        sign = -1 if self.quality != STEP_SECONDS and self.direction == "max" else 1
        worst = Spread(sign * math.inf, math.nan)
        rows.sort(key=lambda row: sign * row.measures.get(self.quality, worst).mean)
        self.front = [] if is_one else self._front(rows)
        self.rows = [*self.front, *(row for row in rows if row not in self.front)]
        self.against = None if against is None else self._named(against)

    @property
    def quality(self) -> str:
        """The measure by which settings are ranked: the first known of `best`, `last`, the metric, `step_seconds`."""
        return next((name for name in (*self._ranking, self.metric) if name in self.measures), STEP_SECONDS)

    @cached_property
    def reference(self) -> Row | None:
        """The row with which the others are compared; None with several metrics, or without a row with two seeds."""
        rows = self.rows if len(self.metrics) == 1 else []
        return self.against or next((row for row in rows if len(self.by_seed(row)) > 1), None)

    @cached_property
    def contrasts(self) -> dict[int, Contrast]:
        """The comparison of `quality` with that of the reference by the index of a row, as far as seeds permit one."""
        if self.reference is None:
            return {}
        theirs = self.by_seed(self.reference)
        every = {i: contrast(self.by_seed(row), theirs) for i, row in enumerate(self.rows) if row is not self.reference}
        found = {index: each for index, each in every.items() if each}
        return dict(zip(found, corrected(list(found.values()), is_best=self.against is None), strict=True))

    def by_seed(self, row: Row) -> dict[str, float]:
        """Return the `quality` of a row by seed, without seeds that lack it; of several runs with a seed, the mean."""
        values: dict[str, list[float]] = {}
        for run in row.runs:
            if self.quality in (numbers := self.measured(run)):
                values.setdefault(_seed(run), []).append(numbers[self.quality])
        return {seed: statistics.fmean(each) for seed, each in values.items()}

    def _named(self, name: str) -> Row:
        options, directory = set(re.split(r",(?=[\w.]+=)", name)), Path(name).name
        found = [row for row in self.rows if directory in {run.directory.name for run in row.runs}]
        found = found or [row for row in self.rows if options <= {*row.options}]
        if len(found) == 1:
            return found[0]
        rows = [",".join(row.options) for row in found or self.rows]
        why = f"{len(found)} rows have these options;" if found else "no row with runs that are done has these options;"
        raise ConfigError("--against", name, why, did_you_mean(name, rows))

    def _metrics_of_sweeps(self, done: list[MeasuredRun]) -> dict[str, str]:
        """Return the `min` or `max` of the metrics that all sweeps name and runs have; empty if sweeps name others."""
        known = {tag for run in done for tag in run.metrics}
        return {tag: goal for tag, goal in self._named_by_sweeps().items() if tag in known and goal in ("min", "max")}

    def _named_by_sweeps(self) -> dict[str, str]:
        first, *others = [ledger.get("metrics", {}) for ledger in self.ledgers.values()] or [{}]
        return first if all(each == first for each in others) else {}

    def _front(self, rows: list[Row]) -> list[Row]:
        import numpy

        complete = [row for row in rows if all(self.metrics.keys() <= self.measured(run).keys() for run in row.runs)]
        most = max((row.seeds for row in complete), default=0)
        complete = [row for row in complete if row.seeds == most]
        self.num_comparable = len(complete)
        signs = [-1 if goal == "max" else 1 for goal in self.metrics.values()]
        means = [[row.measures[tag].mean for tag in self.metrics] for row in complete]
        points = numpy.reshape(means, (-1, len(signs))) * signs
        is_beaten = [((points <= each).all(1) & (points < each).any(1)).any() for each in points]
        return [row for row, beaten in zip(complete, is_beaten, strict=True) if not beaten]

    def measured(self, run: MeasuredRun) -> dict[str, float]:
        """Return the measures of a run by name, as far as they are known."""
        if len(self.metrics) > 1:
            return {tag: float(run.metrics[tag]) for tag in self.metrics if tag in run.metrics} | run.measures
        best = run.best
        numbers = {BEST: best[1]} if best and best[0] == self.metric else {}
        if self.metric in run.metrics:
            numbers[LAST] = float(run.metrics[self.metric])
        return numbers | run.measures

    def title(self, measure: str) -> str:
        tags = {tag: tag if tag in MEASURED else f"last {tag}" for tag in self.metrics}
        titles = tags | {BEST: f"best {self.metric}", LAST: tags[self.metric]}
        titles |= {STEPS: "steps done"} if STEPS in self.keys else {}  # beside those that were typed
        return one_line((titles | {RATE: "samples/s", STEP_SECONDS: "seconds per step"}).get(measure, measure))

    def _row(self, runs: list[MeasuredRun]) -> Row:
        measured = [self.measured(run) for run in runs]
        names = [name for name in self._names if any(name in each for each in measured)]
        spreads = {name: Spread.of(each[name] for each in measured if name in each) for name in names}
        return Row(self._values(runs[0].labels), runs, spreads)

    def _values(self, labels: dict[str, Any]) -> dict[str, Any]:
        return {key: labels[key] for key in self.keys if key in labels}

    def _failure(self, run: MeasuredRun, pruned: Collection[Path]) -> Failure:
        reason: str = _REASONS.get(run.state) or run.result.get("error", "")
        if not run.labels:
            reason = "its config.yaml cannot be read"
        state = "damaged" if run.state == "done" else run.state
        if state == "stopped" and run.directory.absolute() in pruned:
            state, reason = "pruned", "the pruner of the search has stopped it"
        return Failure(self._values(run.labels), self.name(run.directory), state, run.steps, _whole(reason))

    def _jobs_without_run(self, sweep: Path, ledger: dict[str, Any]) -> Iterator[Failure]:
        """Yield a failure for each job that is not done and has no run directory, such as a refused job."""
        runs = {entry.name for entry in os.scandir(sweep) if entry.is_dir(follow_symlinks=False)}
        for entry in ledger["jobs"].values():
            name, state = entry.get("directory", ""), one_line(entry.get("state", "killed"))
            if name in runs or state == "done":  # the user has removed the directory of a job that is done
                continue
            if state in ("running", "queued") and not is_locked(sweep):
                state = "killed"
            texts = [text for text in entry.get("overrides", []) if isinstance(text, str)]
            values = self._values({override_key(text): text.partition("=")[2].strip("'\"") for text in texts})
            yield Failure(values, self.name(sweep / name), state, None, _whole(entry.get("error", "")))

    def name(self, path: Path) -> str:
        """Return a path relative to the directory that contains all runs, as it is shown."""
        return one_line(redacted(os.path.relpath(path.absolute(), self._base)))


def _whole(reason: str) -> str:
    return one_line(redacted(reason), sys.maxsize)


def _seed(run: MeasuredRun) -> str:
    """Return the seed of a run. Repeats with one seed are not independent of each other."""
    return repr(run.labels.get("seed"))
