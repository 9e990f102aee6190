"""The runs below a directory, as points that can be compared: what differs between them, and what repeats them."""

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
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from runner.config.options import CONF
from runner.storage.run_directory import read_result
from runner.sweep.ledger import read_ledger

REPEATS = ("seed", "repeat")
"""The keys that repeat a measurement instead of making another one."""

_WRITTEN = ("name", "output_root", "resume")
"""Where a run is written, not what it does."""


@dataclass(frozen=True)
class Measured:
    """One run directory: its config as `key: value`, options by their names, and its result as far as it came."""

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
        """The median time of a step, the warm-up left out."""
        return float(self.result["step_seconds"]["median"])

    @property
    def samples_per_second(self) -> float:
        """The throughput at that time."""
        return self.labels["batch_size"] / self.seconds

    @property
    def failure(self) -> str:
        """Why it cannot be counted; empty where it can."""
        if not self.result:
            return "no result: killed, or still running"
        if self.result.get("status") != "done":
            return ": ".join(filter(None, (str(self.result.get("status")), str(self.result.get("error", "")))))
        return "" if self.result.get("step_seconds") else "it measured no step"


class Spread(NamedTuple):
    """Mean and standard deviation (of the sample; nan for one value) of repeated measurements."""

    mean: float
    deviation: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        values = list(values)
        return cls(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else math.nan)

    @property
    def bar(self) -> float:
        """Half an error bar: nothing where there is no spread."""
        return 0.0 if math.isnan(self.deviation) else self.deviation


@dataclass(frozen=True)
class Point:
    """Runs that differ by a repeat at most.

    Args:
        values: what makes it differ from the others, by key; a key that its options do not have is left out.
    """

    values: dict[str, Any]
    runs: tuple[Measured, ...]
    metric: str

    @property
    def mode(self) -> str:
        return self.runs[0].mode

    @property
    def seconds(self) -> Spread:
        """Of a step."""
        return Spread.of(run.seconds for run in self.runs)

    @property
    def samples_per_second(self) -> Spread:
        return Spread.of(run.samples_per_second for run in self.runs)

    @property
    def final(self) -> Spread | None:
        """The study's metric at the end of the runs."""
        values = [run.result["metrics"][self.metric] for run in self.runs if self.metric in run.result["metrics"]]
        return Spread.of(values) if values else None


class Study:
    """What a set of runs shows.

    Args:
        runs: all of them, those that failed too.
    """

    def __init__(self, runs: list[Measured]):
        self.runs = runs
        self.failed = [run for run in runs if run.failure]
        counted = [run for run in runs if not run.failure]
        ledgers = {path: read_ledger(path) for path in sorted({run.directory.parent for run in runs})}
        self.unfinished = {path: ledger for path, ledger in ledgers.items() if ledger and not ledger.get("complete")}
        self.keys = swept_keys(runs)
        self.metric = _metric(counted)
        self.machines = sorted({run.machine for run in counted})
        groups: dict[tuple, list[Measured]] = {}
        for run in counted:
            groups.setdefault(tuple(repr(run.labels.get(key)) for key in self.keys), []).append(run)
        self.points = [
            Point({key: group[0].labels[key] for key in self.keys if key in group[0].labels}, tuple(group), self.metric)
            for group in groups.values()
        ]

    def single(self, point: Point) -> Point | None:
        """What `point` is to be compared with: the single device, all but the mode being equal."""
        alike = [other for other in self.points if other.mode == "single" and elsewhere(other) == elsewhere(point)]
        return alike[0] if len(alike) == 1 else None


def elsewhere(point: Point) -> dict[str, Any]:
    """What makes `point` differ from others beside its mode and the mode's options."""
    return {key: value for key, value in point.values.items() if key.partition(".")[0] != "parallel"}


def find_runs(paths: Iterable[Path]) -> Iterator[Measured]:
    """The run directories at and below `paths`, in the order of their names, each once."""
    seen = set()
    for path in paths:
        for place, folders, files in os.walk(path):
            folders.sort()
            if "config.yaml" in files:
                folders.clear()  # a run holds no runs
                if (directory := Path(place)).resolve() not in seen:
                    seen.add(directory.resolve())
                    yield _read(directory)


def _read(directory: Path) -> Measured:
    try:
        config: Any = OmegaConf.to_container(OmegaConf.load(directory / "config.yaml"))
        labels = labels_of(config)
    except (OSError, ValueError, AttributeError, YAMLError, OmegaConfBaseException):
        return Measured(directory, {}, {"status": "its config.yaml cannot be read"}, "")
    return Measured(directory, labels, read_result(directory), _machine(directory))


def _machine(directory: Path) -> str:
    """Where a run was measured, in a few words."""
    try:
        told = json.loads((directory / "environment.json").read_text(encoding="utf-8"))
        devices = Counter(device["name"] for device in told["devices"])
        names = [f"{count} × {name}" if count > 1 else name for name, count in devices.items()]
        where = ", ".join(names) or f"{told['cpu']['model']}, {told['cpu']['allowed_cores']} cores"
        return f"{where}, torch {told['versions']['torch'].partition('+')[0]}"
    except (OSError, ValueError, KeyError, TypeError):
        return "an unknown machine"


# ---------------------------------------------------------------------------------------------------------------------
# What differs


def labels_of(config: dict[str, Any]) -> dict[str, Any]:
    """The leaves of a config by dotted key; a group's own key tells its option."""
    labels: dict[str, Any] = {}
    for key, value in config.items():
        if not isinstance(value, dict):
            labels[key] = value
            continue
        labels[key] = _option(key, value)
        labels |= {f"{key}.{name}": inner for name, inner in value.items() if name != "_target_"}
    return labels


def _option(group: str, node: dict[str, Any]) -> str:
    """The name of the option that `node` is of: of those of its class the one that it differs from the least."""
    target = str(node.get("_target_"))
    alike = [(name, values) for name, values in _options(group).items() if values.get("_target_") == target]
    if not alike:
        return target.split(".")[-2] if target.count(".") else target  # one file a mode: its name
    return min(alike, key=lambda option: sum(node.get(key) != value for key, value in option[1].items()))[0]


@cache
def _options(group: str) -> dict[str, dict[str, Any]]:
    contents = {path.stem: OmegaConf.load(path) for path in sorted((CONF / group).glob("*.yaml"))}
    plain: dict[str, Any] = {name: OmegaConf.to_container(content) for name, content in contents.items()}
    return plain


def swept_keys(runs: list[Measured]) -> list[str]:
    """The keys that have several values among `runs`, without those that only repeat, or that follow from an option.

    With `model=resnet18,resnet50` the key is `model`; that `model.depth` differs follows from it.
    """
    swept: list[str] = []
    for key in dict.fromkeys(key for run in runs for key in run.labels):
        having = [run for run in runs if key in run.labels]
        values = {repr(run.labels[key]) for run in having}
        if key in (*REPEATS, *_WRITTEN) or len(values) < 2:
            continue
        group = key.partition(".")[0]
        pairs = {(repr(run.labels[group]), repr(run.labels[key])) for run in having}
        if group == key or group not in swept or len(pairs) > len({option for option, _ in pairs}):
            swept.append(key)
    return swept


def _metric(runs: list[Measured]) -> str:
    """The tag of what most of the runs call their best; else of any evaluation; else of the training loss."""
    best = Counter(run.result["best"]["metric"] for run in runs if run.result.get("best"))
    tags = sorted({tag for run in runs for tag in run.result["metrics"]}, key=lambda tag: (tag[:5] != "eval/", tag))
    return next(iter([*(tag for tag, _ in best.most_common(1)), *tags]), "")
