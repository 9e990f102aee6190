"""Reads the runs below a directory, and groups them into points by the values of the swept keys."""

from __future__ import annotations

import json
import math
import os
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import OmegaConf

from runner.config.options import option_files
from runner.storage.run_directory import ENVIRONMENT, LIMIT_BYTES, read_result
from runner.storage.safe_read import read_regular
from runner.storage.saved_config import UnreadableConfigError
from runner.storage.saved_run import saved_config
from runner.sweep.ledger_file import read_ledger
from runner.tools.plot_checks import damage, one_line

REPEATS = ("seed", "repeat")
"""Keys that distinguish repeats of one measurement."""

_WRITTEN = ("name", "output_root", "resume")
"""Keys that say where a run is written."""


@dataclass(frozen=True)
class MeasuredRun:
    """A run, as read from its directory.

    Args:
        directory: the path of the run directory.
        labels: the values in the run's config by dotted key (`model.depth`), and the option of each group (`model`).
        result: the content of `result.json`; empty if the file does not exist.
        machine: a short description of the machine on which the run was trained.
    """

    directory: Path
    labels: dict[str, Any]
    result: dict[str, Any]
    machine: str

    @property
    def mode(self) -> str:
        """The parallel mode."""
        return str(self.labels.get("parallel", "single"))

    @property
    def seconds(self) -> float:
        """The median step time in seconds, without the warm-up."""
        return float(self.result["step_seconds"]["median"])

    @property
    def samples_per_second(self) -> float:
        """The throughput at the median step time."""
        return self.labels["batch_size"] / self.seconds

    @property
    def failure(self) -> str:
        """Why the run is excluded from the plots; empty if it is not excluded."""
        if not self.result:
            return "no result: killed, still running, or a damaged result.json"
        if self.result.get("status") != "done":
            return ": ".join(filter(None, (str(self.result.get("status")), str(self.result.get("error", "")))))
        return "" if self.result.get("step_seconds") else "it measured no step"


class Spread(NamedTuple):
    """The mean and the sample standard deviation of repeated measurements; for a single value, `deviation` is NaN."""

    mean: float
    deviation: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Return the spread of `values`."""
        values = list(values)
        return cls(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else math.nan)

    @property
    def bar(self) -> float:
        """Half the length of an error bar, that is, the standard deviation; 0 for a single value."""
        return 0.0 if math.isnan(self.deviation) else self.deviation


@dataclass(frozen=True)
class Point:
    """The repeats of one measurement: runs that differ only in their seed.

    Args:
        values: the value of each swept key that the runs have.
        runs: the runs, one for each repeat.
        metric: the tag of the metric of the study.
    """

    values: dict[str, Any]
    runs: tuple[MeasuredRun, ...]
    metric: str

    @property
    def mode(self) -> str:
        """The parallel mode."""
        return self.runs[0].mode

    @property
    def seconds(self) -> Spread:
        """Seconds per step, over the repeats."""
        return Spread.of(run.seconds for run in self.runs)

    @property
    def samples_per_second(self) -> Spread:
        """Samples per second, over the repeats."""
        return Spread.of(run.samples_per_second for run in self.runs)

    @property
    def final(self) -> Spread | None:
        """The metric of the study at the end of a run, over the repeats; None if no run has this metric."""
        metrics = [run.result.get("metrics", {}) for run in self.runs]
        values = [values[self.metric] for values in metrics if self.metric in values]
        return Spread.of(values) if values else None


class Study:
    """The points to plot for a set of runs, and the runs that failed.

    Args:
        runs: all runs, including failed runs.
    """

    def __init__(self, runs: list[MeasuredRun]):
        self.runs = runs
        self.failed = [run for run in runs if run.failure]
        counted = [run for run in runs if not run.failure]
        ledgers = {path: read_ledger(path) for path in sorted({run.directory.parent for run in runs})}
        self.unfinished = {path: ledger for path, ledger in ledgers.items() if ledger and not ledger.get("complete")}
        self.keys = swept_keys(runs)
        self.metric = _metric(counted)
        self.machines = sorted({run.machine for run in counted})
        groups: dict[tuple, list[MeasuredRun]] = {}
        for run in counted:
            groups.setdefault(tuple(repr(run.labels.get(key)) for key in self.keys), []).append(run)
        self.points = [
            Point({key: group[0].labels[key] for key in self.keys if key in group[0].labels}, tuple(group), self.metric)
            for group in groups.values()
        ]

    def single(self, point: Point) -> Point | None:
        """Return the single-device point with the same values of other swept keys as `point`; None if there is none.

        The options of the parallel mode are not compared.
        """
        values = other_values(point)
        matching = [each for each in self.points if each.mode == "single" and other_values(each) == values]
        return matching[0] if len(matching) == 1 else None


def other_values(point: Point) -> dict[str, Any]:
    """Return the values of the swept keys of `point`, without the parallel mode and its options."""
    return {key: value for key, value in point.values.items() if key.partition(".")[0] != "parallel"}


def find_runs(paths: Iterable[Path]) -> Iterator[MeasuredRun]:
    """Yield every run in the directories `paths`, at any depth. A run found twice is yielded only once."""
    seen = set()
    for path in paths:
        for folder, subfolders, files in os.walk(path):
            subfolders.sort()
            if "config.yaml" in files:
                subfolders.clear()  # a run directory contains no other runs
                if (directory := Path(folder)).resolve() not in seen:
                    seen.add(directory.resolve())
                    yield _read(directory)


def _read(directory: Path) -> MeasuredRun:
    try:
        labels = labels_of(saved_config(directory).values)
    except UnreadableConfigError:
        return MeasuredRun(directory, {}, {"status": "its config.yaml cannot be read"}, "")
    result = read_result(directory)
    if why := damage(labels, result):
        result = {"status": why}
    return MeasuredRun(directory, labels, result, _machine(directory))


def _machine(directory: Path) -> str:
    """Return a short description of the machine of a run."""
    try:
        environment = json.loads(read_regular(directory / ENVIRONMENT, LIMIT_BYTES))
        cpu, devices = environment["cpu"], Counter(str(device["name"]) for device in environment["devices"])
        names = [f"{count} × {name}" if count > 1 else name for name, count in devices.items()]
        hardware = ", ".join(names) or f"{cpu['model']}, {cpu['allowed_cores']} cores"
        return one_line(f"{hardware}, torch {str(environment['versions']['torch']).partition('+')[0]}")
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return "an unknown machine"


# ---------------------------------------------------------------------------------------------------------------------
# Swept keys


def labels_of(config: dict[str, Any]) -> dict[str, Any]:
    """Return the values in a config by dotted key (`model.depth`), and the chosen option of each group (`model`)."""
    labels: dict[str, Any] = {}
    for key, value in config.items():
        if not isinstance(value, dict):
            labels[key] = value
            continue
        labels[key] = _option(key, value)
        labels |= {f"{key}.{name}": inner for name, inner in value.items() if name != "_target_"}
    return labels


def _option(group: str, node: dict[str, Any]) -> str:
    """Return the name of the option of `group` that is most similar to `node` and has the same class.

    If no option has this class, return the name of the module of the class.
    """
    target = str(node.get("_target_"))
    candidates = [(name, values) for name, values in _options(group).items() if values.get("_target_") == target]
    if not candidates:
        return target.split(".")[-2] if target.count(".") else target  # the name of the module, as for parallel modes
    return min(candidates, key=lambda option: sum(node.get(key) != value for key, value in option[1].items()))[0]


@cache
def _options(group: str) -> dict[str, dict[str, Any]]:
    contents = {name: OmegaConf.load(path) for name, path in option_files().get(group, {}).items()}
    plain: dict[str, Any] = {name: OmegaConf.to_container(content) for name, content in contents.items()}
    return plain


def swept_keys(runs: list[MeasuredRun]) -> list[str]:
    """Return the keys that have several values among `runs`, except `REPEATS` and keys that an option determines.

    With `model=resnet18,resnet50`, for example, the swept key is `model`: it determines `model.depth`.
    """
    swept: list[str] = []
    for key in dict.fromkeys(key for run in runs for key in run.labels):
        runs_with_key = [run for run in runs if key in run.labels]
        values = {repr(run.labels[key]) for run in runs_with_key}
        if key in (*REPEATS, *_WRITTEN) or len(values) < 2:
            continue
        group = key.partition(".")[0]
        pairs = {(repr(run.labels[group]), repr(run.labels[key])) for run in runs_with_key}
        if group == key or group not in swept or len(pairs) > len({option for option, _ in pairs}):
            swept.append(key)
    return swept


def _metric(runs: list[MeasuredRun]) -> str:
    """Return the tag of the metric by which most runs choose the best checkpoint.

    If no run chooses a best checkpoint, return any tag, preferably of `eval/*`; an empty text if there are no tags.
    """
    best = Counter(run.result["best"]["metric"] for run in runs if run.result.get("best"))
    tags = sorted(
        {tag for run in runs for tag in run.result.get("metrics", {})}, key=lambda tag: (tag[:5] != "eval/", tag)
    )
    return next(iter([*(tag for tag, _ in best.most_common(1)), *tags]), "")
