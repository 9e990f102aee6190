"""Configs and runs from a command line, in this process."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from runner.cli.arguments import quoted
from runner.cli.composition import Composer
from runner.config.options import CONF
from runner.parallel.context import Process
from runner.run import Result, Run, Session, build_run
from runner.training import train, train_rank

FAST = ("model=tiny", "data.size=8", "device=cpu", "device.threads=1")
"""Overrides with which a step takes a millisecond."""


def composed(*overrides: str) -> dict[str, Any]:
    """The resolved config of a command line, as the command composes it."""
    return copy.deepcopy(_composed(overrides))


@functools.cache
def _composed(overrides: tuple[str, ...]) -> dict[str, Any]:
    return Composer().run([quoted(text, sweep=False) for text in ("name=test", *overrides)]).config


def built(*overrides: str) -> Run:
    """The run of a command line."""
    return build_run(composed(*overrides))


def prepared(run: Run) -> Session:
    """The session of a run in this process; of a mode that starts others, rank 0's before they are started."""
    with run.parallel.launcher(run.device).connect() as process:
        return run.prepare(process)


class Trained(NamedTuple):
    """A run that was trained: what it was, where it is, and how it ended."""

    run: Run
    directory: Path
    result: Result


def train_in(
    directory: Path,
    run: Run,
    change: Callable[[Session], Any] = lambda session: None,
    train_rank: Callable[[dict[str, Any], Path, Process], Result] = train_rank,
) -> Trained:
    """Train `run` in this process, or in those of its mode, as the command does.

    Args:
        change: is called with the session in this process before it begins.
        train_rank: is called in the processes that the mode starts.
    """
    directory.mkdir(exist_ok=True)
    launcher = run.parallel.launcher(run.device)
    with launcher.connect() as process:
        session = run.prepare(process)
        change(session)
        here, there = partial(train, session, directory), partial(train_rank, run.config, directory)
        return Trained(run, directory, launcher.launch(here, there, session.context, directory))


def option_node(group: str, option: str) -> dict[str, Any]:
    """What the file of an option says, with what it inherits from the files in its defaults list."""
    content = yaml.safe_load((CONF / group / f"{option}.yaml").read_text(encoding="utf-8"))
    defaults = [name for name in content.pop("defaults", []) if isinstance(name, str) and name != "_self_"]
    inherited = [name for name in defaults if "@" not in name]  # as opposed to what is put elsewhere in the config
    return {key: value for name in inherited for key, value in option_node(group, name).items()} | content
