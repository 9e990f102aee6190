"""Composes configs with Hydra. Hydra's launchers, sweepers, callbacks, logging and run directories are not used."""

from __future__ import annotations

import logging
import os
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, NamedTuple

from hydra import version
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path, get_args_parser
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from runner.cli.config_loader import ConfigLoader
from runner.cli.config_source import OptionFiles
from runner.cli.hydra_errors import blamed, config_error
from runner.config.errors import ABSENT, ConfigError, check, did_you_mean
from runner.config.options import CONF
from runner.config.plain_values import resolved

_JOB_KEYS = ("job.name", "job.override_dirname", "job.config_name")
_OWN_KEYS = ("verbose", "searchpath", "sweeper.params", "overrides", "runtime", *_JOB_KEYS)
"""Keys of the config node `hydra` that users may set, or that Hydra fills in from the command line."""


class Job(NamedTuple):
    """A composed config as plain values, and the overrides from which it was composed."""

    config: dict[str, Any]
    overrides: list[str]


class Composer:
    """Composes configs from conf/ and the directory of `--config-dir`.

    Args:
        config_dir: a directory with the structure of conf/; None to compose from conf/ only.
        root: the name of the root config.

    Raises:
        ConfigError: if `config_dir` does not exist.
    """

    def __init__(self, config_dir: str | None = None, root: str = "config"):
        self._root = root
        version.setbase("1.3")
        Plugins.instance().register(OptionFiles)
        search_path = create_config_search_path(f"{OptionFiles.scheme()}://{CONF}")
        if config_dir is not None:
            path = os.path.abspath(os.path.expanduser(config_dir))
            remedy = "name a directory with the structure of conf/"
            is_there = config_dir != "" and os.path.isdir(path)
            check(is_there, "--config-dir", config_dir, "there is no such directory", remedy)
            can_be_read = os.access(path, os.R_OK | os.X_OK)
            check(can_be_read, "--config-dir", config_dir, "it cannot be read", "make it readable")
            own = SearchPathQuery(provider="schema")
            search_path.prepend("command-line", f"{OptionFiles.scheme()}://{path}", anchor=own)
        self._loader = ConfigLoader(search_path)
        self._hydra = Hydra("runner", self._loader)

    def run(self, overrides: list[str]) -> Job:
        """Compose the config of a single run.

        Raises:
            ConfigError, HydraException, OmegaConfBaseException: if the config cannot be composed.
        """
        with composition_errors():
            config = self._load(overrides, RunMode.RUN)
            _set_log_level(config)
            if swept := ", ".join(map(str, config.hydra.sweeper.params or {})):
                print(f"one run of a study over {swept}: add -m for all", file=sys.stderr)
            return _job(config)

    def show(self, overrides: list[str], flags: Namespace) -> None:
        """Print the composed config in the form that `--cfg`, `--package` and `--resolve` select.

        Raises:
            ConfigError, HydraException, OmegaConfBaseException: if the config cannot be composed or resolved, or does
                not have the key that `--package` names.
        """
        with composition_errors():
            config = self._load(overrides, RunMode.RUN)
            HydraConfig.instance().set_config(config)
            config = self._hydra.get_sanitized_cfg(config, flags.cfg)
            package = "" if flags.package in (None, "_global_") else flags.package
            shown = OmegaConf.select(config, package) if package else config
            if shown is None:
                nearest = did_you_mean(package, (str(key) for key in config))
                raise ConfigError("--package", package, "the config has no such key;", nearest)
            if not OmegaConf.is_config(shown):
                print(shown)
                return
            if flags.resolve:
                OmegaConf.resolve(shown)
            print(f"# @package {package}\n" if package else "", OmegaConf.to_yaml(shown), sep="", end="")

    def answer(self, overrides: list[str], flags: Namespace) -> None:
        """Print what `--info`, `--hydra-help` or `--shell-completion` asks for.

        Raises:
            ConfigError, HydraException, OmegaConfBaseException: if the config cannot be composed, or the value of the
                flag is invalid.
        """
        flags.overrides = overrides
        with composition_errors():
            if flags.hydra_help:
                self._hydra.hydra_help(self._root, get_args_parser(), flags)
            elif flags.info is not None:
                self._hydra.show_info(flags.info, self._root, overrides)
            else:
                self._complete(overrides)

    def _complete(self, overrides: list[str]) -> None:
        flag, remedy = "--shell-completion", 'eval "$(runner -sc install=bash)" first'
        asks = "query=bash" not in overrides or "COMP_LINE" in os.environ
        check(asks, flag, "query=bash", "only the shell asks for completions; it sets COMP_LINE", remedy)
        try:
            self._hydra.shell_completion(self._root, overrides)
        except (ValueError, YAMLError, OmegaConfBaseException) as error:
            why = " ".join(str(error).split())
            raise ConfigError(flag, ABSENT, why, "for example runner -sc install=bash") from None

    def sweep(self, overrides: list[str]) -> DictConfig:
        """Compose the config that all jobs of a sweep have in common, including the config node `hydra`.

        Raises:
            ConfigError, HydraException, OmegaConfBaseException: if the config cannot be composed.
        """
        with composition_errors():
            config = self._load(overrides, RunMode.MULTIRUN)
            _set_log_level(config)
            return config

    def parse(self, overrides: list[str]) -> list[Override]:
        """Parse overrides with Hydra's grammar.

        Raises:
            ConfigError, HydraException: if an override does not conform to the grammar.
        """
        with composition_errors():
            return OverridesParser.create(self._loader).parse_overrides(overrides)

    def job(self, sweep: DictConfig, number: int, overrides: list[str]) -> Job:
        """Compose the config of a job of a sweep.

        Args:
            sweep: the config of the sweep, as the method `sweep` returns it.
            number: the number of the job, from 0.
            overrides: the overrides of the job.

        Raises:
            ConfigError, HydraException, OmegaConfBaseException: if the config cannot be composed.
        """
        with composition_errors():
            try:
                config = self._loader.load_sweep_config(sweep, overrides)
            except Exception as error:
                raise self._explained(error, overrides, RunMode.RUN) from error
            self._check_hydra(config)
            with open_dict(config):
                config.hydra.job.id = config.hydra.job.num = number
            return _job(config)

    def _load(self, overrides: list[str], mode: RunMode) -> DictConfig:
        try:
            config = self._loader.load_configuration(self._root, overrides, mode)
        except Exception as error:
            raise self._explained(error, overrides, mode) from error
        self._check_hydra(config)
        return config

    def _explained(self, error: Exception, overrides: list[str], mode: RunMode) -> Exception:
        """Return a config error that names the override that caused `error`.

        Return `error` itself if `config_error` can translate it, or if the cause is not found.

        First, the config is composed several times, each time without one of the overrides. If composing succeeds, the
        override that was left out is the cause. If composing always fails, for example because several overrides are
        wrong, the config is composed with the first override, then with the first two, and so on. If composing fails
        with the same message as `error`, the override that was added last is the cause.
        """
        if config_error(error) is not None:
            return error
        for override in overrides:
            with suppress(Exception):
                self._loader.load_configuration(self._root, [text for text in overrides if text != override], mode)
                return blamed(error, override)
        for count, override in enumerate(overrides, start=1):  # if there are several mistakes
            try:
                self._loader.load_configuration(self._root, overrides[:count], mode)
            except Exception as first:
                if str(first) == str(error):
                    return blamed(error, override)
        return error

    def _check_hydra(self, config: DictConfig) -> None:
        """Raise a `ConfigError` if an option file sets a Hydra key that has no effect in this project."""
        words: Any = OmegaConf.to_container(config.hydra.overrides, resolve=False)
        typed = "hydra" in str([*words["task"], *words["hydra"]])
        if not typed and not OptionFiles.sets_hydra:
            return  # composing Hydra's own config takes 40 ms
        ours, theirs = _flat(config.hydra), _hydra_without_options()
        changed = [key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key)]
        for key in changed:
            own = any(key == name or key.startswith(f"{name}.") for name in _OWN_KEYS)
            why = "an option file sets this key of Hydra, which only composes the config here"
            remedy = "hydra.sweeper.params, hydra.verbose and hydra.searchpath are those that have an effect"
            check(own, f"hydra.{key}", ours.get(key), why, remedy)


def _set_log_level(config: DictConfig) -> None:
    """Show the debug messages of the loggers that `hydra.verbose` names, or of all loggers if it is true."""
    verbose = config.hydra.verbose
    names = list(verbose) if OmegaConf.is_list(verbose) else [verbose]
    is_known = isinstance(verbose, bool) or all(isinstance(name, str) and name for name in names)
    check(is_known, "hydra.verbose", verbose, "it must be true, false or names of loggers", "hydra.verbose=true")
    for name in names if verbose is not False else []:
        logging.getLogger(None if name is True else name).setLevel(logging.DEBUG)


_GLOBAL_GROUPS = {"debug", "experiment", "local"}
"""Config groups whose files set keys of the whole config, instead of the options of a component."""


def _job(config: DictConfig) -> Job:
    HydraConfig.instance().set_config(config)  # interpolations may refer to it
    overrides: Any = OmegaConf.to_container(config.hydra.overrides, resolve=False)["task"]  # pyright: ignore
    with read_write(config), open_dict(config):
        del config["hydra"]
        config.pop("sweep", None)  # how a sweep is run does not change what its jobs compute
    for group in sorted(_GLOBAL_GROUPS.intersection(config)):
        # Hydra puts the keys of such a file under the group's name
        why = "the file of this option does not begin with `# @package _global_`"
        raise ConfigError(group, ABSENT, why, "make this its first line, as in the files of conf/experiment")
    return Job(resolved(config), overrides)


@cache
def _hydra_without_options() -> dict[str, Any]:
    """Return Hydra's default values of the config node `hydra`: a dict from dotted keys to values.

    The option files of this project, which may change these values, are not read.
    """
    loader = ConfigLoaderImpl(create_config_search_path(None))
    return _flat(loader.load_configuration(None, [], RunMode.RUN).hydra)


def _flat(node: DictConfig) -> dict[str, Any]:
    """Return a dict from dotted keys to the values in `node`, at any depth."""
    found: dict[str, Any] = {}

    def add(value: Any, key: str) -> None:
        if isinstance(value, dict) and value:
            for name, inner in value.items():
                add(inner, f"{key}.{name}" if key else str(name))
        else:
            found[key] = value

    add(OmegaConf.to_container(node), "")
    return found


@contextmanager
def composition_errors() -> Iterator[None]:
    """Convert an unexpected error raised inside the context into a `ConfigError` or a `HydraException`.

    The context only composes a config. Any error is therefore caused by the config, and is shown without a traceback.
    """
    try:
        yield
    except (ConfigError, HydraException, OmegaConfBaseException):
        raise
    except RecursionError:
        remedy = "values are at most lists of lists"
        raise ConfigError("config", ABSENT, "a value is nested too deeply, or refers to itself", remedy) from None
    except Exception as error:  # errors that Hydra does not wrap
        raise HydraException(f"{type(error).__name__}: {error}") from error
