"""Composes a config from overrides, as the command does, without leaving a trace in Hydra's global objects."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton
from hydra.core.utils import JobRuntime
from hydra.errors import HydraException
from hydra.version import VersionBase
from omegaconf.basecontainer import BaseContainer
from omegaconf.errors import OmegaConfBaseException

from runner.config.composition import Composer, Job
from runner.config.errors import ABSENT, ConfigError, check
from runner.config.hydra_errors import config_error, explain
from runner.config.options import option_name
from runner.config.overrides import (
    as_typed,
    checked_override,
    is_sweep_option,
    override_key,
    override_value,
    resumed,
    text_override,
)
from runner.storage.saved_run import config_yaml
from runner.system.secrets import redacted_values

JOB_MODULES = (
    *("torch.utils.flop_counter", "torch.utils.tensorboard.summary", "PIL.ImageDraw", "psutil"),
    *("runner.tracking.event_file", "runner.api.run_job", "runner.api.composing", "runner.commands.train"),
)
"""Modules that the jobs of a sweep need. Their server imports them once, also those that a run imports late.

The command is the last: it defers the import of torchvision, which each job would then do for itself.
"""

_composing = threading.RLock()


class Config(dict[str, Any]):
    """A composed config: a dict of plain values by key, such as `config["optimizer"]["lr"]`.

    Its attribute `config_dir` is the argument of `compose`.
    """

    def __init__(self, values: Mapping[str, Any], overrides: Sequence[str] = (), config_dir: str | None = None):
        super().__init__(values)
        self._composed, self._typed, self.config_dir = deepcopy(dict(values)), tuple(overrides), config_dir

    @property
    def overrides(self) -> tuple[str, ...]:
        """The overrides that were passed to `compose`, and in place of them those of values that were changed since."""
        from runner.tracking.recorder import flatten  # imports torch, which composing does not need

        then, now = flatten(self._composed), flatten(self)
        changed = {key: as_typed(value) for key, value in now.items() if value != then.get(key, ABSENT)}
        changed |= {
            key: option_name(key, self[key]) for key in changed.keys() & self.keys() if isinstance(self[key], dict)
        }
        kept = [word for word in self._typed if override_key(word) not in changed]
        return (*kept, *(f"{key}={value}" for key, value in changed.items()))

    def __repr__(self) -> str:
        return f"Config(overrides={redacted_values(list(self.overrides))})"

    def __str__(self) -> str:
        """Return the config as YAML, without credentials."""
        return config_yaml(self)


def compose(overrides: Sequence[str] = (), *, config_dir: str | os.PathLike[str] | None = None) -> Config:
    """Return the config that `python -m runner OVERRIDES` would train.

    The values in the config are not checked until the config is passed to `runner.train`.

    Args:
        overrides: what is typed after the command: `["parallel=ddp", "optimizer.lr=0.1"]`. With `resume=PATH`, the
            overrides change the config of the run at PATH.
        config_dir: a directory of options of your own, with the structure of conf/; None to use only conf/.

    Raises:
        ConfigError: if there is no such option, key, run or `config_dir`, or the overrides cannot be parsed.
    """
    check_list_of_texts(overrides)
    for word in overrides:
        checked_override(word)
    folder = None if config_dir is None else os.fspath(config_dir)
    with separate_hydra():
        job = compose_run(composer_of(overrides, folder), overrides)
    return Config(job.config, job.overrides, folder)


def check_list_of_texts(overrides: Any) -> Sequence[str]:
    """Return `overrides`, after checking that it is a list: each letter of a string would be taken for an override."""
    is_list = isinstance(overrides, Sequence) and not isinstance(overrides, str)
    why, remedy = "it is not a list of strings", 'for example ["parallel=ddp", "seed=1"]'
    check(is_list and all(isinstance(word, str) for word in overrides), "overrides", overrides, why, remedy)
    for word in overrides:
        check(not word.startswith("-"), word, ABSENT, "flags belong to the command", "leave it out")
    return overrides


def compose_run(composer: Composer, overrides: Sequence[str]) -> Job:
    """Compose the config of a single run from overrides that `checked_override` has accepted."""
    for word in overrides:
        of_sweep = is_sweep_option(word) or word.partition("=")[2].startswith("zip(")
        remedy = "add -m (in Python: runner.sweep), or leave it out"
        check(not of_sweep, override_key(word), ABSENT, "only a sweep has this option", remedy)
    job = composer.run(overrides)
    source = job.config.get("resume", "never")
    why = "an option file sets it, where the defaults would replace the options of that run"
    is_typed = source in ("auto", "never") or override_value(overrides, "resume") is not None
    check(is_typed, "resume", source, why, f"type it: {text_override('resume', source)}")
    return job


def composer_of(overrides: Sequence[str], config_dir: str | None, job_number: int = 0) -> Composer:
    """Return a composer for a single run. With `resume=PATH`, its root config is the config of the run at PATH."""
    source = resumed(overrides)
    if source is None:
        return Composer(config_dir, job_number=job_number)
    from runner.api.saved_defaults import saved_root

    return Composer(config_dir, saved_root(source, overrides))


@contextmanager
def separate_hydra() -> Iterator[None]:
    """A context in which composing does not change Hydra's global objects: the caller may be a program of Hydra.

    Only one thread at a time is in it.

    Raises:
        ConfigError: in place of Hydra's errors.
    """
    with _composing:
        yield from _separate_hydra()


def _separate_hydra() -> Iterator[None]:
    Plugins.instance()  # whose import registers options, only once
    instances, resolvers = Singleton._instances, BaseContainer._resolvers
    separate: Any = {cls: each for cls, each in instances.items() if cls not in (HydraConfig, JobRuntime, VersionBase)}
    Singleton._instances = separate | {ConfigStore: deepcopy(ConfigStore.instance())}
    BaseContainer._resolvers = dict(resolvers)
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        remedy = "python -m runner --help lists the options"
        raise config_error(error) or ConfigError("overrides", ABSENT, explain(error), remedy) from None
    finally:
        Singleton._instances, BaseContainer._resolvers = instances, resolvers
