"""Compares saved runs: a row for each combination of the options that differ, and one for each run that failed."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from runner.config.errors import check, did_you_mean
from runner.storage.safe_read import walk
from runner.sweep.ledger_file import LEDGER, read_ledger
from runner.sweep.metric_direction import direction
from runner.system.secrets import redacted
from runner.system.utf8 import printable
from runner.tools.plot_checks import is_finite, one_line
from runner.tools.run_states import ENDED, is_locked, state_of, steps_of
from runner.tools.saved_runs import (
    REMOVED,
    REPEATS,
    MeasuredRun,
    common_metric,
    find_runs,
    grouped,
    swept_keys,
)
from runner.tracking.spread import Spread

BEST, LAST, STEPS, SECONDS, RATE = "best", "last", "steps", "seconds", "samples_per_second"

_TYPED = {RATE: "samples/s"}
"""The titles of columns, where they differ from the names of the measures."""

_REASONS = {"killed": "it was killed: it has no result", "damaged": "its result.json is damaged"}


@dataclass(frozen=True)
class Row:
    """Runs that are done and differ only in their seed.

    Args:
        values: the values of the keys that differ among all runs; without the keys that these runs do not have.
        runs: the runs.
        measures: the numbers of the runs by measure (`best`, `last`, `steps`, `seconds`, `samples_per_second`). A
            measure may have fewer numbers than there are runs, but not none.
    """

    values: dict[str, Any]
    runs: tuple[MeasuredRun, ...]
    measures: dict[str, list[float]]

    def spread(self, measure: str) -> Spread | None:
        """Return the mean and the standard deviation of a measure over the runs; None if no run has it."""
        return Spread.of(self.measures[measure]) if measure in self.measures else None


class Failure(NamedTuple):
    """A run that is not done, or a job of a sweep that has no run directory.

    Args:
        values: the values of the keys that differ among all runs.
        name: the run directory, relative to the directory that contains all runs.
        state: `crashed`, `refused`, `diverged`, `stopped`, `running`, `killed` or `damaged`.
        step: the number of completed steps; None if it is not known.
        reason: why it failed.
    """

    values: dict[str, Any]
    name: str
    state: str
    step: int | None
    reason: str


class Comparison:
    """The rows of a table that compares all runs below `paths`.

    Args:
        paths: run directories, sweeps, or directories with these at any depth.
        metric: the TensorBoard tag of the metric to compare; None for the metric that selects the best checkpoint.
        sort: the measure or the key to sort by; None for the metric.

    Raises:
        ConfigError: if there is no run, or none has the metric or the key.
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
        """Return the rows with the best first, or by the measure or key `sort`; rows without it come last."""
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
        """Yield the jobs of a sweep that have no run directory, because their configs were refused, for example."""
        runs = {entry.name for entry in os.scandir(sweep) if entry.is_dir(follow_symlinks=False)}
        for entry in ledger["jobs"].values():
            name, state = entry.get("directory", ""), one_line(entry.get("state", "killed"))
            if name in runs or state == "done":  # of a job that is done, the user has removed the directory
                continue
            if state in ("running", "queued") and not is_locked(sweep):
                state = "killed"
            typed = dict(_split(text) for text in entry.get("overrides", []) if isinstance(text, str))
            values = {key: typed[key] for key in self.keys if key in typed}
            yield Failure(values, self._name(sweep / name), state, None, _shown(entry.get("error", "")))

    def _name(self, path: Path) -> str:
        return one_line(redacted(os.path.relpath(path.absolute(), self._base)))


def find_sweeps(paths: Iterable[Path]) -> list[Path]:
    """Return the directories at and below `paths` that contain the ledger of a sweep, each once."""
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
    """Return the finite numbers in the result of a run by measure."""
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
    """Return the tag of the metric that the user names, with or without `eval/`.

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
    """Return `keys` with the keys that a sweep varies first, in the order of its overrides."""
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
    """Return a sort key: numbers by size before text, and a missing value last."""
    number = is_finite(value)
    return value is None, not number, float(value) if number else 0.0, "" if number else str(value)


def _shown(reason: str) -> str:
    return one_line(redacted(printable(reason)))
