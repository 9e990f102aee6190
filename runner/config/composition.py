"""Composes configs with Hydra. Hydra's launchers, sweepers, callbacks, logging and run directories are not used.

No other module imports from `hydra._internal`.
"""

from __future__ import annotations

import copy
import logging
import os
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import hydra
from hydra import version
from hydra._internal import config_loader_impl
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override, OverrideType
from hydra.core.plugins import Plugins
from hydra.core.utils import JobRuntime, setup_globals
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from runner.config import references, sweep_functions, user_code
from runner.config.errors import ABSENT, ConfigError, check, did_you_mean
from runner.config.hydra_errors import config_error
from runner.config.option_source import OptionFiles, modified
from runner.config.options import CONF
from runner.config.overrides import override_key, quoted

_GLOBAL_GROUPS = ("debug", "experiment", "local")
"""Config groups whose files set keys of the whole config, instead of the options of a component."""
_LENGTHS = {"epochs", "workload.env_steps"}
"""Keys that say how long a run is if `steps` is null."""
_TRACKERS = re.compile(r"tracking=(\[.*\])")
_NAME = "${hydra:runtime.choices.workload}"
"""The name of a run in conf/config.yaml."""
_SEVERAL = "runner.tracking.base.MultiTracker"
_SAVED = "saved"
_COMPOSED: dict[tuple, tuple[DictConfig, dict[Path, int]]] = {}
"""What Hydra has composed, by the overrides that choose files, with the times at which the files were modified."""
_MOST_COMPOSED = 64


class Job(NamedTuple):
    """A composed config as plain values, and the overrides from which it was composed."""

    config: dict[str, Any]
    overrides: list[str]


class Composer:
    """Composes configs from conf/ and the directory of `--config-dir`.

    `tracking=[tensorboard,csv]` is short for `tracking=several tracking.names=[tensorboard,csv]`, whose options are
    composed into `tracking.trackers`. An override of `epochs` also sets `steps=null`, which would hide it otherwise.

    Args:
        config_dir: a directory with the structure of conf/; None to compose from conf/ only.
        root: the name of the root config: that of conf/, or the one that `register_saved` returns.
        job_number: the value of `${hydra:job.num}` in a single run, which may be a job of a sweep.

    Raises:
        ConfigError: if `config_dir` does not exist.
        ConfigError, HydraException, OmegaConfBaseException: by the methods, if a config cannot be composed.
    """

    def __init__(self, config_dir: str | None = None, root: str = "config", job_number: int = 0):
        self._root, self._job_number = root, job_number
        if hydra.__version__.startswith("1.3."):  # later versions have no other defaults
            version.setbase("1.3")
        setup_globals()
        JobRuntime.instance().set("name", "runner")
        Plugins.instance().register(OptionFiles)
        references.register()
        search_path = create_config_search_path(f"{OptionFiles.scheme()}://{CONF}")
        if config_dir is not None:
            path = os.path.abspath(os.path.expanduser(config_dir))
            if config_dir == "" or not os.path.isdir(path) or not os.access(path, os.R_OK | os.X_OK):
                why, remedy = "there is no such directory, or it cannot be read", "name one with the groups of conf/"
                raise ConfigError("--config-dir", config_dir, why, remedy)
            schemas = SearchPathQuery(provider="schema")
            search_path.prepend("command-line", f"{OptionFiles.scheme()}://{path}", anchor=schemas)
        self._loader = ConfigLoaderImpl(search_path)

    def run(self, overrides: Iterable[str]) -> Job:
        """Compose the config of a single run from overrides as they are typed."""
        with composition_errors():
            config = self._load([quoted(word, sweep=False) for word in overrides], RunMode.RUN)
            if swept := ", ".join(map(str, config.hydra.sweeper.params or {})):
                print(f"one run of a study over {swept}: add -m for all", file=sys.stderr)
            return _job(config, self._job_number)

    def sweep(self, overrides: list[str]) -> DictConfig:
        """Compose the options of a sweep itself: the config nodes `sweep` and `hydra`."""
        with composition_errors():
            return self._load(overrides, RunMode.MULTIRUN)

    def job(self, sweep: DictConfig, number: int, overrides: list[str]) -> Job:
        """Compose the config of the job `number`, from 0, of a `sweep` that the method `sweep` has returned."""
        with composition_errors():
            config = self._load([*sweep.hydra.overrides.hydra, *overrides], RunMode.RUN)
            OmegaConf.copy_cache(sweep, config)  # `${now:…}` is the same in all jobs
            return _job(config, number)

    def parse(self, overrides: list[str]) -> list[Override]:
        """Parse overrides with Hydra's grammar."""
        with composition_errors():
            return sweep_functions.parser(self._loader).parse_overrides(overrides)

    def has_group(self, name: str) -> bool:
        return self._loader.repository.group_exists(name)

    def is_study(self, word: str) -> bool:
        """Return whether the option that the override `word` of a config group chooses may say what is swept."""
        group, _, option = word.lstrip("+").replace("'", "").partition("=")
        if group in _GLOBAL_GROUPS:
            return True  # also by its own defaults list
        found = self._loader.repository.load_config(f"{group}/{option}")
        return found is not None and "hydra" in found.config

    def _load(self, overrides: list[str], mode: RunMode) -> DictConfig:
        words = [*user_code.expanded(with_several_trackers(overrides), is_new=self._root != _SAVED)]
        try:
            config = self._compose(words, mode)
        except Exception as error:
            raise self._blamed(error, words, mode) from error
        if config.hydra.verbose:
            logging.getLogger().setLevel(logging.DEBUG)
        if named := self._named_trackers(config):
            words += [f"+tracking@tracking.trackers.{name}={name}" for name in named]
            config.tracking.trackers = self._loader.load_configuration(self._root, words, mode).tracking.trackers
        if typed := [word for word in overrides if user_code.typed_files([word])]:
            with read_write(config):
                task: Any = OmegaConf.to_container(config.hydra.overrides.task, resolve=False)
                config.hydra.overrides.task = [*typed, *(word for word in task if word not in {*words} - {*overrides})]
        raw: Any = OmegaConf.to_container(OmegaConf.masked_copy(config, ["name"]), resolve=False)
        if raw["name"] == _NAME and config.hydra.runtime.choices.get("workload") in ("_user", "_steps"):
            OmegaConf.update(config, "name", user_code.run_name(config.code))
        typed = set(map(override_key, words))
        if typed & _LENGTHS and "steps" not in typed:
            OmegaConf.update(config, "steps", None)
        return config

    def _compose(self, words: list[str], mode: RunMode) -> DictConfig:
        """Return the config as Hydra composes it; values are set in what it has composed of the other words.

        That is kept for the next config, which then takes an eighth of the time.
        """
        overrides = self.parse(words)
        deleted = {each.key_or_group for each in overrides if each.is_delete()}
        values = [each for each in overrides if self._sets_value(each) and each.key_or_group not in deleted]
        others = [str(each.input_line) for each in overrides if each not in values]
        if self._root == _SAVED or mode is RunMode.MULTIRUN or (composed := self._composed(others)).hydra.searchpath:
            return self._loader.load_configuration(self._root, words, mode)
        config = copy.deepcopy(composed)
        self._loader._apply_overrides_to_config(values, config)
        typed, job = [each for each in overrides if not each.is_hydra_override()], config.hydra.job
        config.hydra.runtime.cwd = os.getcwd()
        config.hydra.overrides.task = [each.input_line for each in typed]
        if dirname := getattr(config_loader_impl, "get_overrides_dirname", None):  # of Hydra 1.3; later, a resolver
            job.override_dirname = dirname(typed, **job.config.override_dirname)
        return config

    def _composed(self, words: list[str]) -> DictConfig:
        key = str(self._loader.get_search_path()), *words
        config, files = _COMPOSED.get(key, (None, {}))
        if config is None or {path: modified(path) for path in files} != files:
            OptionFiles.looked_up.clear()
            config = self._loader.load_configuration(self._root, words, RunMode.RUN)
            _COMPOSED[key] = config, {path: modified(path) for path in OptionFiles.looked_up}
            if len(_COMPOSED) > _MOST_COMPOSED:
                del _COMPOSED[next(iter(_COMPOSED))]
        return config

    def _sets_value(self, override: Override) -> bool:
        key = override.key_or_group
        is_set = override.type in (OverrideType.CHANGE, OverrideType.FORCE_ADD) and not override.is_sweep_override()
        return is_set and not key.startswith("hydra") and not self._loader.repository.group_exists(key)

    def _blamed(self, error: Exception, overrides: list[str], mode: RunMode) -> Exception:
        """Return a config error that names the override at fault, if `error` does not say which one it is."""
        for count, override in enumerate(overrides if config_error(error) is None else [], start=1):
            try:
                self._loader.load_configuration(self._root, overrides[:count], mode)
            except Exception as first:
                key, _, value = override.partition("=")
                said = str(first) or str(first.__cause__) or type(first).__name__
                why = f"Hydra cannot use it ({said.splitlines()[0]})"
                why = "it has no value that could be deleted" if said.endswith("does not exist.") else why
                return ConfigError(override_key(key), value or ABSENT, why, f"leave {key} out, or choose another value")
        return error

    def _named_trackers(self, config: DictConfig) -> list[str]:
        """Return the trackers that `tracking=several` combines; none if `MultiTracker` will refuse their names."""
        node: Any = OmegaConf.to_container(config, resolve=False).get("tracking")  # pyright: ignore
        if not isinstance(node, dict) or node.get("_target_") != _SEVERAL:
            return []
        why, remedy = "they are the options in tracking.names", "an option file in --config-dir sets other values"
        check(not node.get("trackers"), "tracking.trackers", ABSENT, why, remedy)
        names = node.get("names")
        if not isinstance(names, list) or len({*map(str, names)}) < len(names):
            return []
        known = [name for name in self._loader.get_group_options("tracking") if name not in ("several", _SAVED)]
        for name in map(str, names):
            check(name in known, "tracking.names", name, "there is no such tracker;", did_you_mean(name, known))
        return [*map(str, names)]


def with_several_trackers(overrides: Iterable[str]) -> Iterator[str]:
    for text in overrides:
        if trackers := _TRACKERS.fullmatch(text):
            yield "tracking=several"
            yield f"tracking.names={trackers[1]}"
        else:
            yield text


def register_saved(config: Mapping[str, Any], groups: Collection[str], absent: Collection[str]) -> str:
    """Register the config of a saved run with Hydra as a root config, and return the name of this root config.

    Each component becomes an option of its group. An optional group, such as `local`, gets no option.

    Args:
        config: the config, which Hydra must not resolve: without references (`${…}`).
        groups: the config groups of components.
        absent: those of the groups for which no option is chosen if `config` has none; others get their default.
    """
    root: Any = OmegaConf.to_container(OmegaConf.load(CONF / "config.yaml"), resolve=False)
    chosen: dict[str, str | None] = {group: _SAVED for group in groups if config.get(group) is not None}
    chosen = dict.fromkeys(absent) | chosen
    defaults = [
        entry
        if isinstance(entry, str)
        else {
            group: None if group.startswith("optional ") else chosen.get(group, option)
            for group, option in entry.items()
        }
        for entry in root.pop("defaults")
    ]
    store = ConfigStore.instance()
    for options in (store.repo, *(store.repo.get(group, {}) for group in chosen)):
        options.pop(f"{_SAVED}.yaml", None)  # of an earlier command in this process: Hydra 1.5 replaces no config
    for group, option in chosen.items():
        if option is not None:
            store.store(group=group, name=_SAVED, node=config[group])
    values = {key: value for key, value in config.items() if key not in groups}
    store.store(name=_SAVED, node={"defaults": defaults, **root, **values})
    return _SAVED


def _job(config: DictConfig, number: int) -> Job:
    with open_dict(config):
        config.hydra.job.id, config.hydra.job.num = str(number), number
    HydraConfig.instance().set_config(config)  # interpolations may refer to it
    overrides: Any = OmegaConf.to_container(config.hydra.overrides, resolve=False)["task"]  # pyright: ignore
    with read_write(config), open_dict(config):
        del config["hydra"]
        config.pop("sweep", None)  # how a sweep is run does not change what its jobs compute
    for group in _GLOBAL_GROUPS:
        # Hydra puts the keys of such a file under the group's name
        why = "the file of this option does not begin with `# @package _global_`"
        remedy = "make this its first line, as in the files of conf/experiment"
        check(group not in config, group, ABSENT, why, remedy)
    return Job(_with_text_keys(references.resolved(config)), overrides)


def _with_text_keys(node: Any) -> Any:
    """Return `node`, in which whole numbers as keys are texts: `0` in `optimizer.groups` is the name of a module."""
    if not isinstance(node, dict):
        return node
    return {str(key) if type(key) is int else key: _with_text_keys(value) for key, value in node.items()}


@contextmanager
def composition_errors() -> Iterator[None]:
    """Convert an error raised inside the context, which only composes, to a `ConfigError` or `HydraException`."""
    try:
        yield
    except (ConfigError, HydraException, OmegaConfBaseException):
        raise
    except Exception as error:  # errors that Hydra does not wrap
        raise HydraException(f"{type(error).__name__}: {error}") from error
