"""Compare the options of a run before and after training; imported in each rank, so it imports little."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

from runner.parallel.collectives import Collectives
from runner.result import Result
from runner.run import Run, build_run
from runner.tracking.log_file import LogFile
from runner.training import train


def options_of(component: Any, path: str = "") -> dict[str, Any]:
    """Return deep copies of the fields of `component`, by dotted name."""
    options: dict[str, Any] = {}
    for field in dataclasses.fields(component):
        value, name = getattr(component, field.name), f"{path}{field.name}"
        if dataclasses.is_dataclass(value):
            options |= {name: type(value).__qualname__} | options_of(value, f"{name}.")
        else:
            options[name] = copy.deepcopy(value)
    return options


def changed_options(before: dict[str, Any], run: Run) -> dict[str, tuple[Any, Any]]:
    """(value before, value now) of every option of `run` that has changed."""
    now = options_of(run)
    names = [name for name in (*before, *(now.keys() - before.keys())) if before.get(name) != now.get(name)]
    return {name: (before.get(name), now.get(name)) for name in names}


def train_and_log(config: dict[str, Any], directory: Path) -> Result:
    directory.mkdir(exist_ok=True)
    run = build_run(config)
    with run.parallel.launcher(run.device).connect() as process, LogFile(directory, process.rank):
        return train(run, run.prepare(process), directory)


def train_and_check_options(config: dict[str, Any], directory: Path, process: Collectives) -> Result:
    """Train like `runner.training.train_rank`, and fail on each rank whose options have changed by the end."""
    run = build_run(config)
    before = options_of(run)
    session = run.prepare(process)
    with LogFile(directory, process.rank):
        result = train(run, session, directory)
    changed = changed_options(before, run)
    assert not changed, f"rank {process.rank}: {changed}"
    return result
