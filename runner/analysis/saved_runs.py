"""The runs and the sweeps below a directory. Their files may be damaged, or written by somebody else."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from runner.config.errors import ConfigError
from runner.config.options import option_contents, option_name
from runner.config.overrides import LOCATION_KEYS
from runner.config.schema import component_fields, load_class
from runner.result import measured
from runner.run import WORKLOAD_INPUTS
from runner.storage.files import UnsafeFileError, check_no_link, walk
from runner.storage.files import is_locked as is_file_locked
from runner.storage.ledger_file import LEDGER
from runner.storage.manifest import DamagedError, read_manifest
from runner.storage.run_directory import CONFIG, ENVIRONMENT, RESULT, newest_step, read_result, step_name
from runner.storage.saved_run import UnreadableConfigError, is_of_a_run, saved_config, saved_overrides
from runner.workloads.base import Workload

STATES = ("done", "crashed", "diverged", "stopped", "running", "killed", "damaged")
"""All states of a run. The first four are recorded in `result.json`. A killed run has no result; a damaged run has a
result that cannot be read."""

REPEATS = ("seed", "repeat")
"""Config keys in which the repeats of one measurement differ."""


def is_number(value: object) -> bool:
    """Return whether `value` is a finite number with an absolute value below 1e300, and not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300  # false for NaN


def is_locked(directory: Path) -> bool:
    """Return whether a process is writing to the run or the sweep in `directory`."""
    return is_file_locked(directory / ".lock")


@dataclass(frozen=True)
class MeasuredRun:
    """A run, as read from its directory. Each file is read when it is first needed."""

    directory: Path

    @cached_property
    def config(self) -> dict[str, Any]:
        """The config, which must not be changed; empty if it cannot be read."""
        try:
            return saved_config(self.directory, is_read_only=True).values
        except UnreadableConfigError:
            return {}

    @cached_property
    def overrides(self) -> list[str]:
        """The overrides that were typed; empty if they cannot be read."""
        return saved_overrides(self.directory)

    @cached_property
    def labels(self) -> dict[str, Any]:
        """What `labels_of` returns for the config, with the names of options as they were typed."""
        labels = labels_of(self.config)
        return labels | user_options(self.overrides, labels)

    @cached_property
    def result(self) -> dict[str, Any]:
        """The content of `result.json`, without numbers that cannot have been measured; empty if it cannot be read."""
        result = read_result(self.directory)
        if not result:
            return {}
        result["metrics"] = {tag: value for tag, value in result.get("metrics", {}).items() if is_number(value)}
        times = result.get("step_seconds", {})
        is_measured = "median" in times and all(is_number(value) and value > 1e-12 for value in times.values())
        result["step_seconds"] = times if is_measured else {}
        numbers = ("seconds", "samples_per_second", "peak_memory_bytes", "world_size")
        return {key: value for key, value in result.items() if key not in numbers or is_number(value)}

    @property
    def metrics(self) -> dict[str, float]:
        """The last values of the metrics, and what is `MEASURED` over the run, by TensorBoard tag."""
        return measured(self.result)

    @cached_property
    def best(self) -> tuple[str, float] | None:
        """The tag and the value of the best evaluation, without a result that of the newest checkpoint; or None."""
        best = self.result.get("best")
        with suppress(DamagedError, ConfigError, OSError):
            if not best:
                newest = self.directory / "checkpoints" / step_name(newest_step(self.directory))
                best = read_manifest(newest).get("best")
        valid = isinstance(best, dict) and isinstance(best.get("metric"), str) and is_number(best.get("value"))
        return (best["metric"], float(best["value"])) if best and valid else None

    @cached_property
    def state(self) -> str:
        """One of `STATES`."""
        if self.result:
            return self.result["status"] if self.result["status"] in STATES[:4] else "damaged"
        if is_locked(self.directory):  # tested only if necessary: meanwhile, no run can lock the directory
            return "running"
        return "damaged" if os.path.lexists(self.directory / RESULT) else "killed"

    @property
    def steps(self) -> int | None:
        """The number of completed steps: of the result or, without one, of the newest checkpoint; None if unknown."""
        if self.result:
            return self.result["steps"]
        try:
            check_no_link(self.directory / "checkpoints")
            return newest_step(self.directory) or None
        except UnsafeFileError:
            return None

    @property
    def mode(self) -> str:
        return str(self.labels.get("parallel", "single"))

    @property
    def measures(self) -> dict[str, float]:
        """The `steps`, `seconds`, `step_seconds` (the median) and `samples_per_second` of a run that is done."""
        numbers = {
            "steps": self.result["steps"],
            "seconds": self.result.get("seconds", 0),
            "step_seconds": self.result["step_seconds"].get("median", 0),
            "samples_per_second": self.result.get("samples_per_second", 0),
        }
        return {name: float(number) for name, number in numbers.items() if number > 0}  # 0: it was not measured


def find_runs(paths: Collection[Path]) -> Iterator[MeasuredRun]:
    """Yield the runs at and below the directories `paths`, down to 50 levels below them, each run once.

    Links to directories are not followed. A run that is unfinished or cannot be read is yielded, too.
    """
    return (MeasuredRun(folder) for folder, is_run in _folders(paths) if is_run)


def find_runs_and_sweeps(paths: Collection[Path]) -> tuple[list[MeasuredRun], list[Path]]:
    """Return what `find_runs` yields, and the directories at and below `paths` with the ledger of a sweep."""
    folders = [*_folders(paths)]
    sweeps = [folder for folder, is_run in folders if not is_run and os.path.lexists(folder / LEDGER)]
    return [MeasuredRun(folder) for folder, is_run in folders if is_run], sweeps


def _folders(paths: Collection[Path]) -> Iterator[tuple[Path, bool]]:
    """Yield each directory at and below `paths`, except those inside a run directory, and whether it is one."""
    seen = set()
    for path in paths:
        for top, subfolders, files in walk(path):
            folder = Path(top)
            # Hydra writes a config.yaml, too, but without a SHA-256.
            known = CONFIG in files and (ENVIRONMENT in files or RESULT in files or is_of_a_run(folder))
            if is_run := known or newest_step(folder) > 0:
                subfolders.clear()
            subfolders.sort()
            if (real := folder.resolve() if len(paths) > 1 else folder) not in seen:
                seen.add(real)
                yield folder, is_run


# ---------------------------------------------------------------------------------------------------------------------
# Config keys


def labels_of(config: dict[str, Any]) -> dict[str, Any]:
    """Return the values in a config by dotted key (`model.depth`), and the chosen options by config group (`model`).

    Groups that the workload does not use, such as `env` of a classifier, are left out, if its class can be imported.
    """
    labels: dict[str, Any] = {}
    unused = _unused(str((config.get("workload") or {}).get("_target_")))
    for key, value in config.items():
        if not isinstance(value, dict):
            labels[key] = value
        elif key not in unused:
            labels[key] = option_name(key, value)
            labels |= {f"{key}.{name}": inner for name, inner in value.items() if name != "_target_"}
    return labels


@cache
def _unused(workload: str) -> set[str]:
    with suppress(Exception):  # its package may raise anything
        return {*WORKLOAD_INPUTS} - {*component_fields(load_class(workload, Workload))}
    return set()


def user_options(overrides: Iterable[str], labels: dict[str, Any]) -> dict[str, str]:
    """Return the typed options that are not in conf/, but in the user's `--config-dir`, by config group."""
    groups = {key.partition(".")[0] for key in labels if "." in key}
    typed = (text.partition("=") for text in overrides)
    return {
        group: name
        for group, _, name in typed
        if group in groups and re.fullmatch(r"[\w-]{1,100}", name) and name not in option_contents(group)
    }


def swept_keys(runs: list[dict[str, Any]], typed: Collection[str] = ()) -> list[str]:
    """Return the config keys whose values differ among `runs`, given by their labels (see `labels_of`).

    Left out are the keys in `REPEATS`, keys that determine where a run is saved, and keys whose values follow from the
    option of their group: with `model=resnet18,resnet50`, `model` is returned, but `model.depth` is not. Keys whose
    values follow from the workload are only returned if they are among those that were `typed`.
    """
    swept: list[str] = []
    for key in dict.fromkeys(key for labels in runs for key in labels):
        with_key = [labels for labels in runs if key in labels]
        if key in (*REPEATS, *LOCATION_KEYS) or len({repr(labels[key]) for labels in with_key}) < 2:
            continue
        group = key.partition(".")[0]
        if group in swept and _follows(key, group, with_key):
            continue
        if key == "workload" or key in typed or not _follows(key, "workload", with_key):
            swept.append(key)
    return swept


def _follows(key: str, other: str, runs: list[dict[str, Any]]) -> bool:
    """Return whether runs with the same value of `other` have the same value of `key`."""
    pairs = {(repr(labels.get(other)), repr(labels[key])) for labels in runs}
    return len(pairs) == len({value for value, _ in pairs})
