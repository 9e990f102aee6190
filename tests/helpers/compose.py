"""Compose configs, build runs and train them from command-line overrides, in this process."""

import copy
import dataclasses
import functools
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

from runner.config.composition import Composer
from runner.config.options import CONF, option_files
from runner.config.overrides import quoted
from runner.parallel.collectives import Collectives
from runner.parallel.session import Session
from runner.result import Result
from runner.run import Run, build_run
from runner.training import train, train_rank

TINY_CPU = ("model=tiny", "data.size=8", "device=cpu", "device.threads=1")
"""Overrides with which a step takes a millisecond."""


def compose_config(*overrides: str) -> dict[str, Any]:
    return copy.deepcopy(_composed(overrides))


GROUPS, SET_OTHERS = {*option_files()}, ("debug=", "experiment=", "local=", "workload=")
"""The config groups, and those of them whose files also set keys of others."""


@functools.cache
def _composed(overrides: tuple[str, ...]) -> dict[str, Any]:
    """As Hydra composes it; options of a component and values are put in here, which takes a fiftieth of the time."""
    plain = [word for word in overrides if re.fullmatch(r"(?!hydra\.|tracking\.)[a-z_]+(\.\w+)*=[^$?{}]*", word)]
    plain = [word for word in plain if word.partition("=")[0] not in GROUPS and ".py" not in word]
    chosen = tuple(word for word in overrides if word not in plain)
    if any(word.partition("=")[0] not in GROUPS for word in chosen):
        return _composed_by_hydra(overrides)
    alone = [word for word in chosen if word.partition("=")[0] not in ("tracking", "sweep")]
    if any(not (CONF / word.replace("'", "").replace("=", "/", 1)).with_suffix(".yaml").is_file() for word in alone):
        return _composed_by_hydra(overrides)  # which refuses it
    if any(word.startswith(SET_OTHERS) for word in chosen):
        alone = []
    config = copy.deepcopy(_composed_by_hydra(tuple(word for word in chosen if word not in alone)))
    for group, _, option in (word.replace("'", "").partition("=") for word in alone):
        config[group] = option_content(group, option)
    typed = {word.partition("=")[0] for word in plain}
    for override in OverridesParser.create().parse_overrides([quoted(word, sweep=False) for word in plain]):
        *above, key = override.key_or_group.split(".")
        node = functools.reduce(lambda node, name: node.get(name) if isinstance(node, dict) else None, above, config)
        if not isinstance(node, dict) or isinstance(node.get(key, {}), dict) or override.is_sweep_override():
            return _composed_by_hydra(overrides)  # which refuses it
        node[key] = override.value()
    if typed & {"epochs", "workload.env_steps"} and "steps" not in typed:
        config["steps"] = None
    return config


@functools.cache
def _composed_by_hydra(overrides: tuple[str, ...]) -> dict[str, Any]:
    return Composer().run(("name=test", *overrides)).config


def build_composed_run(*overrides: str) -> Run:
    """The run that the command builds from these overrides."""
    return build_run(compose_config(*overrides))


def prepare_session(run: Run) -> Session:
    """Return the session of `run` in this process. If the mode starts the ranks, return the session of rank 0."""
    with run.parallel.launcher(run.device).connect() as process:
        return run.prepare(process)


class TrainedRun(NamedTuple):
    run: Run
    directory: Path
    result: Result


def train_in(
    directory: Path,
    run: Run,
    change: Callable[[Run, Session], Any] | None = None,
    train_rank: Callable[[dict[str, Any], Path, Collectives], Result] = train_rank,
) -> TrainedRun:
    """Train `run` in this process or in the processes of its mode, as the command does; no option may change."""
    directory.mkdir(exist_ok=True)
    launcher = run.parallel.launcher(run.device)
    with launcher.connect() as process:
        session = run.prepare(process)
        if change is not None:
            change(run, session)
        before = options_of(run)
        here, there = partial(train, run, session, directory), partial(train_rank, run.config, directory)
        result = launcher.launch(here, there, session, directory)
        assert options_of(run) == before, "an option of the run has changed"
        return TrainedRun(run, directory, result)


def prepared_workload(*overrides: str) -> Any:
    workload = build_composed_run(*overrides).workload
    workload.prepare()
    return workload


def options_of(component: Any, path: str = "") -> dict[str, Any]:
    """Return deep copies of the fields of `component`, by dotted name."""
    options: dict[str, Any] = {}
    for field in dataclasses.fields(component):
        value, name = getattr(component, field.name), f"{path}{field.name}"
        is_component = dataclasses.is_dataclass(value)
        options[name] = type(value).__qualname__ if is_component else copy.deepcopy(value)
        options |= options_of(value, f"{name}.") if is_component else {}
    return options


def option_content(group: str, option: str) -> dict[str, Any]:
    """The content of an option file, merged with what it inherits from the files in its defaults list."""
    return copy.deepcopy(_option_content(group, option))


@functools.cache
def _option_content(group: str, option: str) -> dict[str, Any]:
    content = yaml.safe_load((CONF / group / f"{option}.yaml").read_text(encoding="utf-8"))
    defaults = [name for name in content.pop("defaults", []) if isinstance(name, str) and name != "_self_"]
    inherited = [name for name in defaults if "@" not in name]  # "@" puts a file elsewhere in the config
    return {key: value for name in inherited for key, value in _option_content(group, name).items()} | content
