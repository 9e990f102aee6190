"""A comparison of saved runs: a row for each combination of options, and a failure for each run that is not done."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from runner.analysis.output import one_line
from runner.analysis.plot_checks import is_finite
from runner.analysis.run_states import ENDED, is_locked, state_of, steps_of
from runner.analysis.saved_runs import (
    REMOVED,
    REPEATS,
    MeasuredRun,
    common_metric,
    find_runs,
    grouped,
    swept_keys,
)
from runner.config.errors import check, did_you_mean
from runner.storage.regular_file import walk
from runner.sweep.ledger_reader import LEDGER, read_ledger
from runner.sweep.metric_direction import direction
from runner.system.secrets import redacted
from runner.system.utf8 import printable
from runner.tracking.mean_std import Spread

BEST, LAST, STEPS, SECONDS, RATE = "best", "last", "steps", "seconds", "samples_per_second"

_TYPED = {RATE: "samples/s"}
"""What the user types to sort by a measure, if this is not the name of the measure."""

_REASONS = {"killed": "it was killed: it has no result", "damaged": "its result.json is damaged"}


@dataclass(frozen=True)
class Row:
    """Runs that are done and differ only in their seed.

    Args:
        values: the values of the config keys in which the compared runs differ (see `Comparison`), by dotted key. Keys
            that the runs of this row lack are left out.
        runs: the runs of this row.
        measures: maps each measure to a list with one number for each run that has this measure. The measures are
            `best` and `last` (the best and the last value of the metric), `steps`, `seconds` (the duration of the
            training) and `samples_per_second`. Measures that no run of this row has are left out.
    """

    values: dict[str, Any]
    runs: tuple[MeasuredRun, ...]
    measures: dict[str, list[float]]

    @property
    def seeds(self) -> int:
        """The number of different seeds; smaller than the number of runs if some of the runs have the same seed."""
        return len({tuple(repr(run.labels.get(key)) for key in REPEATS) for run in self.runs})

    def spread(self, measure: str) -> Spread | None:
        """Return the mean and the standard deviation of a measure over the runs; None if no run has this measure."""
        return Spread.of(self.measures[measure]) if measure in self.measures else None


class Failure(NamedTuple):
    """A run that is not done, or a job that is not done and has no run directory.

    Args:
        values: the values of the config keys in which the runs differ, by key; keys that this run lacks are left out.
        name: the path of the run directory, relative to the directory that contains all runs; for a job without a run
            directory, the path that the directory would have had.
        state: `crashed`, `diverged`, `stopped`, `running`, `killed` or `damaged`; a job may also be `refused`, `queued`
            or `pruned`.
        step: the number of completed steps; None if it is not known.
        reason: why the run or the job is not done; empty if the reason is not known, or follows from the state.
    """

    values: dict[str, Any]
    name: str
    state: str
    step: int | None
    reason: str


class Comparison:
    """The rows of a table that compares all runs below `paths`.

    Args:
        paths: run directories, directories of sweeps, or directories that contain such directories at any depth.
        metric: the TensorBoard tag of the metric to compare, with or without `eval/`; None for the metric by which most
            runs choose the best checkpoint (see `common_metric`).
        sort: the column to sort by: `best`, `last`, `steps`, `seconds`, `samples/s`, `runs` or a config key; None for
            `best` or, if no run has a best value of the metric, `last`.

    Attributes:
        keys: the config keys in which any of the runs differ (see `swept_keys`), in the order of their columns.
        metric: the tag of the metric; empty if no run that is done has any metric.
        direction: `max` if larger values of the metric are better, otherwise `min`.
        measures: the measures that at least one row has, in the order of their columns.
        rows: the rows of the runs that are done, sorted.
        failures: a `Failure` for each run that is not done, and for each job that is not done and has no run directory,
            sorted by name.

    Raises:
        ConfigError: if there are no runs, no run that is done has `metric`, or there is no column `sort`.
    """

    def __init__(self, paths: list[Path], metric: str | None = None, sort: str | None = None):
        runs = list(find_runs(paths))
        ledgers = {path: ledger for path in find_sweeps(paths) if (ledger := read_ledger(path))}
        parents = {*(run.directory.absolute().parent for run in runs), *(path.absolute() for path in ledgers)}
        self._base = Path(os.path.commonpath(parents or {Path.cwd()}))
        done = [run for run in runs if run.result.get("status") == "done"]
        self.keys = _swept_first(swept_keys(runs), ledgers.values())
        failed = [self._failed_run(run) for run in runs if run.result.get("status") != "done"]
        failed += [job for path, ledger in ledgers.items() for job in self._jobs_without_run(path, ledger)]
        names = " ".join(map(str, paths))
        why, remedy = "it contains no run", "name a run directory, a sweep, or a directory with some below it"
        check(bool(runs or failed), "PATH", names, why, remedy)
        self.failures = sorted(failed, key=lambda failure: failure.name)
        self.metric = _known_metric(done, metric) if metric else common_metric(done)
        self.direction = direction(self.metric, {run.directory: run.result for run in done})
        rows = [self._row(group) for group in grouped(done, self.keys)]
        self.measures = [name for name in (BEST, LAST, STEPS, SECONDS, RATE) if any(name in r.measures for r in rows)]
        self.rows = self._sorted(rows, sort)

    def _row(self, runs: list[MeasuredRun]) -> Row:
        values = {key: runs[0].labels[key] for key in self.keys if key in runs[0].labels}
        measured = [_measures(run.result, self.metric) for run in runs]
        names = dict.fromkeys(name for measures in measured for name in measures)
        return Row(values, tuple(runs), {name: [each[name] for each in measured if name in each] for name in names})

    def _sorted(self, rows: list[Row], sort: str | None) -> list[Row]:
        """Return the rows sorted by the column `sort`; if `sort` is None, by the metric.

        The columns `best` and `last` are sorted from the best value of the metric to the worst; `samples/s` and `runs`
        are sorted in descending order, and all other columns in ascending order. Rows that have no value in the column
        come last.
        """
        known = [*(_TYPED.get(name, name) for name in self.measures), "runs", *self.keys]
        check(sort is None or sort in known, "--sort", sort, "there is no such column", did_you_mean(str(sort), known))
        measures = {typed: name for name, typed in _TYPED.items()}
        by = measures.get(str(sort), sort) or (BEST if BEST in self.measures else LAST)
        if by in self.keys:
            return sorted(rows, key=lambda row: _ordered(row.values.get(by)))
        numbers = {id(row): float(len(row.runs)) if by == "runs" else _mean(row, by) for row in rows}
        sign = -1 if by in (RATE, "runs") or (by in (BEST, LAST) and self.direction == "max") else 1
        with_number = [row for row in rows if numbers[id(row)] is not None]
        without = [row for row in rows if numbers[id(row)] is None]
        return sorted(with_number, key=lambda row: sign * (numbers[id(row)] or 0.0)) + without

    def _failed_run(self, run: MeasuredRun) -> Failure:
        state = state_of(run.directory, run.result)
        reason = _REASONS.get(state, "")
        if run.result:
            reason = run.result.get("error", "") if state in ENDED else run.result["status"]
        values = {key: run.labels[key] for key in self.keys if key in run.labels}
        return Failure(values, self._name(run.directory), state, steps_of(run.directory, run.result), _shown(reason))

    def _jobs_without_run(self, sweep: Path, ledger: dict[str, Any]) -> Iterator[Failure]:
        """Yield a failure for each job that is not done and has no run directory, such as a refused job."""
        runs = {entry.name for entry in os.scandir(sweep) if entry.is_dir(follow_symlinks=False)}
        for entry in ledger["jobs"].values():
            name, state = entry.get("directory", ""), one_line(entry.get("state", "killed"))
            if name in runs or state == "done":  # the user has removed the directory of a job that is done
                continue
            if state in ("running", "queued") and not is_locked(sweep):
                state = "killed"
            typed = dict(_split(text) for text in entry.get("overrides", []) if isinstance(text, str))
            values = {key: typed[key] for key in self.keys if key in typed}
            yield Failure(values, self._name(sweep / name), state, None, _shown(entry.get("error", "")))

    def _name(self, path: Path) -> str:
        return one_line(redacted(os.path.relpath(path.absolute(), self._base)))


def find_sweeps(paths: Iterable[Path]) -> list[Path]:
    """Return the directories at and below `paths` that contain the ledger of a sweep, without duplicates."""
    found: dict[Path, Path] = {}
    for path in paths:
        for folder, subfolders, files in walk(path):
            subfolders[:] = sorted(name for name in subfolders if not name.startswith(REMOVED))
            if LEDGER in files or "config.yaml" in files:
                subfolders.clear()
            if LEDGER in files:
                found.setdefault(Path(folder).resolve(), Path(folder))
    return list(found.values())


# ---------------------------------------------------------------------------------------------------------------------
# Metrics


def _measures(result: dict[str, Any], metric: str) -> dict[str, float]:
    """Return the numbers in the result of a run, as a dictionary with the keys of `Row.measures`.

    `best` and `last` are values of `metric`. Numbers that are missing or not finite are left out.
    """
    best = result.get("best", {})
    numbers = {
        BEST: best["value"] if best.get("metric") == metric else None,
        LAST: result.get("metrics", {}).get(metric),
        STEPS: result["steps"],
        SECONDS: result.get(SECONDS) or None,  # 0 in a result means that it was not measured
        RATE: result.get(RATE) or None,
    }
    return {name: number for name, number in numbers.items() if number is not None and is_finite(number)}


def _known_metric(runs: list[MeasuredRun], name: str) -> str:
    """Return the tag of the metric `name`, which the user may have typed with or without the prefix `eval/`.

    Raises:
        ConfigError: if no run has this metric.
    """
    tags = {tag for run in runs for tag in run.result.get("metrics", {})}
    tags |= {run.result["best"]["metric"] for run in runs if run.result.get("best")}
    for tag in (name, f"eval/{name}"):
        if tag in tags:
            return tag
    check(False, "--metric", name, "no run that is done has this metric;", did_you_mean(name, tags))
    raise AssertionError


# ---------------------------------------------------------------------------------------------------------------------
# Keys


def _swept_first(keys: list[str], ledgers: Iterable[dict[str, Any]]) -> list[str]:
    """Return `keys` reordered: first the keys that a sweep varies, in the order of its overrides, then all others."""
    swept: dict[str, set[str]] = {}
    for ledger in ledgers:
        for entry in ledger["jobs"].values():
            for text in entry.get("overrides", []):
                key, value = _split(str(text))
                swept.setdefault(key, set()).add(value)
    order = [key for key, values in swept.items() if len(values) > 1 and key not in REPEATS]
    return sorted(keys, key=lambda key: order.index(key) if key in order else len(order))


def _split(override: str) -> tuple[str, str]:
    key, _, value = override.partition("=")
    return key.lstrip("+~"), value.strip("'\"")


def _mean(row: Row, measure: str) -> float | None:
    spread = row.spread(measure)
    return None if spread is None else spread.mean


def _ordered(value: Any) -> tuple[bool, bool, float, str]:
    """Return a sort key that puts numbers first, in ascending order, then text, and None last."""
    number = is_finite(value)
    return value is None, not number, float(value) if number else 0.0, "" if number else str(value)


def _shown(reason: str) -> str:
    return one_line(redacted(printable(reason)))
