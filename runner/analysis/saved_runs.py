"""Functions that read the configs, results and machines of saved runs, and find the keys in which the runs differ."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from runner.analysis.output import one_line
from runner.analysis.plot_checks import damage, is_finite
from runner.config.options import option_files
from runner.storage.regular_file import read_regular, walk
from runner.storage.run_directory import ENVIRONMENT, LIMIT_BYTES, OVERRIDES, newest_step, read_result
from runner.storage.saved_config import UnreadableConfigError
from runner.storage.saved_run import saved_config

REPEATS = ("seed", "repeat")
"""Config keys in which the repeats of one measurement differ."""

REMOVED = ".removed-"
"""The name prefix of a run directory that `runner runs` is removing, or was removing when it was killed."""

_WRITTEN = ("name", "output_root", "resume")
"""Config keys that determine where a run is saved."""


@dataclass(frozen=True)
class MeasuredRun:
    """A run, as read from its directory.

    `seconds` and `samples_per_second` are known only if `failure` is empty.

    Args:
        directory: the path of the run directory.
        labels: the values in the run's config by dotted key (`model.depth`), and the chosen options by config group
            (`model`).
        result: the content of `result.json`; empty if the file does not exist or is damaged. If the config cannot be
            read, or if the config or `result.json` contains a number that is not valid, `result` is instead a dict with
            the single key `status`, whose value is a description of the problem.
        machine: a short description of the machine on which the run was trained.
    """

    directory: Path
    labels: dict[str, Any]
    result: dict[str, Any]
    machine: str

    @property
    def mode(self) -> str:
        """The parallel mode of the run."""
        return str(self.labels.get("parallel", "single"))

    @property
    def seconds(self) -> float:
        """The median step time in seconds, not counting the first steps."""
        return float(self.result["step_seconds"]["median"])

    @property
    def samples_per_second(self) -> float:
        """The throughput of all processes together, in samples per second, from the median step time."""
        rate = self.result.get("samples_per_second") or 0.0
        return float(rate) if rate > 0 and is_finite(rate) else self.labels["batch_size"] / self.seconds

    @property
    def failure(self) -> str:
        """The reason why the run is excluded from plots; empty if the run is not excluded."""
        if not self.result:
            return "no result: killed, still running, or a damaged result.json"
        if self.result.get("status") != "done":
            return ": ".join(filter(None, (str(self.result.get("status")), str(self.result.get("error", "")))))
        return "" if self.result.get("step_seconds") else "it measured no step"


def find_runs(paths: Iterable[Path]) -> Iterator[MeasuredRun]:
    """Yield the runs at and below the directories `paths`, down to 50 levels below them, each run once.

    Links to directories are not followed, and runs that are being removed are left out. A run that is unfinished or
    cannot be read is yielded too, and its `failure` says so. If a run has checkpoints but no `config.yaml`, its config
    is read from the checkpoints.
    """
    seen = set()
    for path in paths:
        for folder, subfolders, files in walk(path):
            subfolders[:] = sorted(name for name in subfolders if not name.startswith(REMOVED))
            if "config.yaml" in files or ("checkpoints" in subfolders and newest_step(Path(folder))):
                subfolders.clear()  # a run directory contains no other runs
                if (directory := Path(folder)).resolve() not in seen:
                    seen.add(directory.resolve())
                    yield _read(directory)


def _read(directory: Path) -> MeasuredRun:
    try:
        labels = labels_of(saved_config(directory).values)
        labels |= _own_options(directory, labels)
    except UnreadableConfigError:
        return MeasuredRun(directory, {}, {"status": "its config.yaml cannot be read"}, "")
    result = read_result(directory)
    if why := damage(labels, result):
        result = {"status": why}
    return MeasuredRun(directory, labels, result, _machine(directory))


def _machine(directory: Path) -> str:
    """Return a short description of the machine on which a run was trained."""
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
    """Return the values in a config by dotted key (`model.depth`), and the chosen options by config group (`model`)."""
    labels: dict[str, Any] = {}
    for key, value in config.items():
        if not isinstance(value, dict):
            labels[key] = value
            continue
        labels[key] = _option(key, value)
        labels |= {f"{key}.{name}": inner for name, inner in value.items() if name != "_target_"}
    return labels


def _option(group: str, node: dict[str, Any]) -> str:
    """Return the name of the option of `group` that is most similar to `node`.

    `group` is a config group, and `node` is its content in a config. Only options with the same `_target_` are
    compared. If there are none, return the name of the module of `_target_`.
    """
    target = str(node.get("_target_"))
    candidates = [(name, values) for name, values in _options(group).items() if values.get("_target_") == target]
    if not candidates:
        return target.split(".")[-2] if target.count(".") else target  # the name of the module, as for parallel modes
    return min(candidates, key=lambda option: sum(node.get(key) != value for key, value in option[1].items()))[0]


def _own_options(directory: Path, labels: dict[str, Any]) -> dict[str, str]:
    """Return the options that the user typed and that are not in conf/, by config group.

    An option that is not in conf/ comes from the user's `--config-dir`.
    """
    try:
        overrides = read_regular(directory / OVERRIDES, LIMIT_BYTES).decode()
    except (OSError, ValueError):
        return {}
    typed = re.findall(r"^- '?(\w{1,100})=([\w-]{1,100})'?$", overrides, re.MULTILINE)
    groups = {key.partition(".")[0] for key in labels if "." in key}
    return {group: name for group, name in typed if group in groups and name not in _files(group)}


@cache
def _files(group: str) -> dict[str, Path]:
    return option_files().get(group, {})


@cache
def _options(group: str) -> dict[str, dict[str, Any]]:
    contents = {name: OmegaConf.load(path) for name, path in _files(group).items()}
    plain: dict[str, Any] = {name: OmegaConf.to_container(content) for name, content in contents.items()}
    return plain


def swept_keys(runs: list[MeasuredRun]) -> list[str]:
    """Return the config keys whose values differ among `runs`, with some exceptions.

    The exceptions are:

    - the keys in `REPEATS`, such as the seed;
    - the keys in `_WRITTEN`, which determine where a run is saved;
    - keys whose values follow from the option of their group. With `model=resnet18,resnet50`, for example, `model` is
      returned, but `model.depth` is not.
    """
    swept: list[str] = []
    for key in dict.fromkeys(key for run in runs for key in run.labels):
        runs_with_key = [run for run in runs if key in run.labels]
        values = {repr(run.labels[key]) for run in runs_with_key}
        if key in (*REPEATS, *_WRITTEN) or len(values) < 2:
            continue
        group = key.partition(".")[0]
        pairs = {(repr(run.labels.get(group)), repr(run.labels[key])) for run in runs_with_key}
        if group == key or group not in swept or len(pairs) > len({option for option, _ in pairs}):
            swept.append(key)
    return swept


def grouped(runs: Iterable[MeasuredRun], keys: Iterable[str]) -> list[list[MeasuredRun]]:
    """Return `runs` in groups with equal values of `keys`. Each group consists of the repeats of one measurement."""
    groups: dict[tuple[str, ...], list[MeasuredRun]] = {}
    keys = list(keys)
    for run in runs:
        groups.setdefault(tuple(repr(run.labels.get(key)) for key in keys), []).append(run)
    return list(groups.values())


def common_metric(runs: list[MeasuredRun]) -> str:
    """Return the tag of the metric by which most runs choose the best checkpoint.

    If no run chooses a best checkpoint, return another tag, preferably a tag that starts with `eval/`. If there are no
    tags, return an empty string.
    """
    best = Counter(run.result["best"]["metric"] for run in runs if run.result.get("best"))
    tags = sorted(
        {tag for run in runs for tag in run.result.get("metrics", {})}, key=lambda tag: (tag[:5] != "eval/", tag)
    )
    return next(iter([*(tag for tag, _ in best.most_common(1)), *tags]), "")
