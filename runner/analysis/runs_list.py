"""Functions that list the runs and the sweeps below a directory, with their states, ages and sizes."""

from __future__ import annotations

import operator
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.analysis.plot_checks import is_finite
from runner.analysis.run_states import is_locked, state_of, steps_of
from runner.analysis.saved_runs import REMOVED
from runner.config.errors import check, did_you_mean
from runner.storage.regular_file import walk
from runner.storage.run_directory import CONFIG, ENVIRONMENT, OVERRIDES, RESULT, read_result
from runner.storage.saved_run import is_of_a_run
from runner.sweep.ledger_reader import LEDGER, num_jobs, read_ledger
from runner.sweep.metric_direction import direction

REMAINS = "removed"
"""The state of a run that is only partly removed, usually because the command that removed it was killed."""

SWEEP_STATES = ("done", "running", "unfinished")

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}
_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}


@dataclass(frozen=True)
class Entry:
    """A run or a sweep in the list.

    Args:
        path: the path of the directory.
        state: for a run, one of `run_states.STATES` or `REMAINS`; for a sweep, one of `SWEEP_STATES`.
        changed: the time of the last change, in seconds since the epoch.
        size: the size on disk, in bytes.
        steps: for a run, the number of completed steps, or None if it is not known; for a sweep, the number of jobs
            that are done.
        jobs: the number of jobs of a sweep; None for a run.
        metric: the tag of the metric that selects the best checkpoint; empty if there is no such metric.
        best: the best value of this metric; None if there is no such metric.
    """

    path: Path
    state: str
    changed: float
    size: int
    steps: int | None
    jobs: int | None = None
    metric: str = ""
    best: float | None = None


@dataclass(frozen=True)
class Filter:
    """The conditions that an entry must meet to be listed. By default, all entries are listed.

    Args:
        states: the accepted states; empty for all states.
        older: the minimum age in seconds; None for no minimum.
        newer: the maximum age in seconds; None for no maximum.
        name: a text that the path must contain.
        best: a condition such as `>0.9` (see `comparison`) on the best value of the metric; empty for no condition.
    """

    states: tuple[str, ...] = ()
    older: float | None = None
    newer: float | None = None
    name: str = ""
    best: str = ""

    def accepts(self, entry: Entry, now: float) -> bool:
        """Return whether `entry` meets all conditions. `now` is the current time in seconds since the epoch."""
        age = now - entry.changed
        return (
            (not self.states or entry.state in self.states)
            and (self.older is None or age >= self.older)
            and (self.newer is None or age <= self.newer)
            and self.name in str(entry.path)
            and (not self.best or (entry.best is not None and comparison("--best", self.best)(entry.best)))
        )


def duration(key: str, text: str) -> float:
    """Return the number of seconds in a duration such as `7d` or `1.5h`.

    Raises:
        ConfigError: if `text` is not a duration. The error names `key`.
    """
    found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)([smhdw])", text)
    check(found is not None, key, text, "it is not a duration", "a number and s, m, h, d or w: 7d is a week")
    assert found is not None
    return float(found[1]) * _UNITS[found[2]]


def comparison(key: str, text: str) -> Callable[[float], bool]:
    """Return a function that checks whether a number meets a condition such as `>0.9`.

    Raises:
        ConfigError: if `text` is not such a condition. The error names `key`.
    """
    found = re.fullmatch(r"\s*(>=|<=|>|<)\s*([-+]?[0-9]*\.?[0-9]+(?:e[-+]?[0-9]{1,3})?)\s*", text, re.IGNORECASE)
    check(
        found is not None, key, text, "it is not a comparison with a number", f"{key} '>0.9', in quotes; or >=, <, <="
    )
    assert found is not None
    compare, number = _COMPARISONS[found[1]], float(found[2])
    return lambda value: compare(value, number)


def states(key: str, text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """Return the states in `text`, which are separated by commas.

    Raises:
        ConfigError: if a state is not in `known`. The error names `key`.
    """
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        check(name in known, key, name, "there is no such status", did_you_mean(name, known))
    return names


def listed_runs(root: Path) -> list[Entry]:
    """Return all runs at and below `root`, the least recently changed first. Links are not followed."""
    return _oldest_first(_run, (path for path in directories(root) if is_run(path)))


def listed_sweeps(root: Path) -> list[Entry]:
    """Return all sweeps at and below `root`, the least recently changed first. Links are not followed."""
    return _oldest_first(_sweep, (path for path in directories(root) if not is_run(path)))


def _oldest_first(read: Callable[[Path], Entry | None], paths: Iterable[Path]) -> list[Entry]:
    entries = []
    for path in paths:
        with suppress(OSError):  # another process has just removed it
            entries.append(read(path))
    return sorted(filter(None, entries), key=lambda entry: (entry.changed, str(entry.path)))


def directories(root: Path) -> Iterator[Path]:
    """Yield `root` and the directories at most 50 levels below it, except directories inside a run directory.

    Links are not followed.
    """
    for folder, subfolders, _ in walk(root):
        yield Path(folder)
        if is_run(Path(folder)):
            subfolders.clear()
        subfolders.sort()


def is_run(path: Path) -> bool:
    """Return whether `path` is a run directory, or the remains of a run directory that was being removed.

    A directory with only a `config.yaml` and an `overrides.yaml` is not, because Hydra writes such files for anybody.
    The config of a run has a SHA-256; that of a run of an earlier version has a result or an environment beside it.
    """
    marks = (CONFIG,) if path.name.startswith(REMOVED) else (CONFIG, OVERRIDES)
    if not (_is(path, stat.S_ISDIR) and all(_is(path / name, stat.S_ISREG) for name in marks)):
        return False
    return marks == (CONFIG,) or is_of_a_run(path) or any((path / name).exists() for name in (ENVIRONMENT, RESULT))


def _is(path: Path, kind: Callable[[int], bool]) -> bool:
    try:
        return kind(os.lstat(path).st_mode)
    except OSError:
        return False


def _run(path: Path) -> Entry:
    result = read_result(path)
    state = REMAINS if path.name.startswith(REMOVED) else state_of(path, result)
    metric, best = _best(result)
    return Entry(path, state, changed(path), size(path), steps_of(path, result), None, metric, best)


def _sweep(path: Path) -> Entry | None:
    """Return the entry of the sweep at `path`; None if there is no sweep."""
    ledger = read_ledger(path)
    if not ledger:
        return None
    state = "running" if is_locked(path) else "done" if ledger["complete"] else "unfinished"
    done = sum(job.get("state") == "done" for job in ledger["jobs"].values())
    results = {child: read_result(child) for child in sorted(path.iterdir()) if is_run(child)}
    bests = [best for best in map(_best, results.values()) if best[1] is not None]
    metric = bests[0][0] if bests else ""
    values = [value for name, value in bests if name == metric and value is not None]
    pick = max if direction(metric, results) == "max" else min
    newest = max([os.lstat(path / LEDGER).st_mtime, *map(changed, results)])
    return Entry(path, state, newest, size(path), done, num_jobs(ledger), metric, pick(values, default=None))


def _best(result: Mapping[str, Any]) -> tuple[str, float | None]:
    """Return the tag and the value of the best evaluation in a run's result; ("", None) if there is no such value."""
    best = result.get("best", {})
    return (best["metric"], float(best["value"])) if best and is_finite(best["value"]) else ("", None)


def changed(path: Path) -> float:
    """Return the time of the last change to a file or folder directly in `path`, in seconds since the epoch."""
    newest = 0.0
    with os.scandir(path) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):  # a running run has removed or renamed it
                newest = max(newest, entry.stat(follow_symlinks=False).st_mtime)
    return newest or os.lstat(path).st_mtime


def size(path: Path) -> int:
    """Return the size on disk of a directory with all of its content, in bytes. Links are not followed."""
    total = os.lstat(path).st_blocks
    for folder, subfolders, files in walk(path):
        for name in (*subfolders, *files):
            try:
                total += os.lstat(os.path.join(folder, name)).st_blocks
            except OSError:  # a running run has removed it
                continue
    return 512 * total


def age(seconds: float) -> str:
    """Return an age as text in the largest unit that fits, such as `3 d`."""
    for unit in ("d", "h", "m"):
        if seconds >= _UNITS[unit]:
            return f"{seconds / _UNITS[unit]:.0f} {'min' if unit == 'm' else unit}"
    return f"{max(0.0, seconds):.0f} s"
