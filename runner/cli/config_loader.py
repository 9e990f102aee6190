"""A subclass of Hydra's config loader with a cache, so that a process composes the same options only once.

Composing a config takes Hydra a tenth of a second. Most of this time goes into the defaults lists and the option files,
which do not depend on the overrides of single values. The jobs of a sweep usually differ only in such overrides.
"""

from __future__ import annotations

import copy
import os
import pickle
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl, get_overrides_dirname
from hydra.core.config_store import ConfigNode, ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.utils import JobRuntime
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from runner.cli.config_source import OptionFiles
from runner.config.errors import ABSENT, check, did_you_mean
from runner.config.overrides import override_key

_MAX_KEPT, _MAX_ENTRIES = 64, 2000
"""The maximum number of configs that are kept, 25 kB each; the number of directory entries above which none is kept."""

_kept: dict[tuple[Any, ...], tuple[DictConfig, bool]] = {}
"""For each result of `ConfigLoader._key`: the composed config, and the `OptionFiles.sets_hydra` of its files."""


_LENGTHS = {"epochs", "workload.env_steps"}
"""Keys that say how long a run is if `steps` is null."""

_TRACKERS = re.compile(r"tracking=(\[.*\])")
_SEVERAL = "runner.tracking.several.Several"


class ConfigLoader(ConfigLoaderImpl):
    """A config loader with a cache of configs.

    A cached config is composed from the option files and the overrides that choose options. Overrides of single values
    are applied to a copy of it. If an option file has changed, the config is composed again.

    The override `tracking=[tensorboard,csv]` is short for `tracking=several tracking.names=[tensorboard,csv]`. Hydra
    itself would use only the last option in the list. The options that `tracking.names` names are composed into
    `tracking.trackers`, because the processes of a run do not know the directory of `--config-dir`.

    An override of `epochs` also sets `steps=null`, because the `steps` of an option file or a saved run would hide it.
    """

    def _load_configuration_impl(
        self, config_name: str | None, overrides: list[str], run_mode: RunMode, *rest: Any, **options: Any
    ) -> DictConfig:
        overrides = list(with_several_trackers(overrides))
        config = self._composed(config_name, overrides, run_mode, *rest, **options)
        if named := self._named_trackers(config):
            nodes = [f"+tracking@tracking.trackers.{name}={name}" for name in named]
            config.tracking.trackers = self._composed(
                config_name, [*overrides, *nodes], run_mode, *rest, **options
            ).tracking.trackers
        typed = set(map(override_key, overrides))
        if typed & _LENGTHS and "steps" not in typed:
            OmegaConf.update(config, "steps", None)
        return config

    def _named_trackers(self, config: DictConfig) -> list[str]:
        """Return the trackers that `tracking=several` combines; empty if another option is chosen.

        Also empty if the names are not a list of distinct names, which `Several` refuses.

        Raises:
            ConfigError: if one of them does not exist.
        """
        node: Any = OmegaConf.to_container(config, resolve=False).get("tracking")  # pyright: ignore
        if not isinstance(node, dict) or node.get("_target_") != _SEVERAL:
            return []
        why, remedy = "they are the options in tracking.names", "an option file in --config-dir sets other values"
        check(not node.get("trackers"), "tracking.trackers", ABSENT, why, remedy)
        names = node.get("names")
        if not isinstance(names, list) or len({*map(str, names)}) < len(names):
            return []
        known = [name for name in self.repository.get_group_options("tracking") if name not in ("several", "saved")]
        for name in map(str, names):
            check(name in known, "tracking.names", name, "there is no such tracker;", did_you_mean(name, known))
        return [*map(str, names)]

    def _composed(
        self, config_name: str | None, overrides: list[str], run_mode: RunMode, *rest: Any, **options: Any
    ) -> DictConfig:
        parsed = OverridesParser.create().parse_overrides(overrides)
        values = [not self._is_option(override) for override in parsed]
        chosen = [text for text, is_value in zip(overrides, values, strict=True) if not is_value]
        key = self._key(config_name, run_mode, chosen)
        is_plain = not any(each.is_sweep_override() or each.key_or_group.startswith("hydra") for each in parsed)
        if key is None or not is_plain:
            return super()._load_configuration_impl(config_name, overrides, run_mode, *rest, **options)
        if key not in _kept and not self._keep(key, config_name, chosen, run_mode, *rest, **options):
            return super()._load_configuration_impl(config_name, overrides, run_mode, *rest, **options)
        kept, sets_hydra = _kept[key]
        OptionFiles.sets_hydra |= sets_hydra
        # Not pickled, which would be faster: Hydra imports its plugins again whenever its singletons are reset, and the
        # classes of a config are then not those that pickle finds by their names.
        config = copy.deepcopy(kept)
        self._apply_overrides_to_config([each for each, value in zip(parsed, values, strict=True) if value], config)
        config.hydra.overrides.task = [each.input_line for each in parsed]
        config.hydra.runtime.cwd = os.getcwd()
        form = config.hydra.job.config.override_dirname
        config.hydra.job.override_dirname = get_overrides_dirname(parsed, form.exclude_keys, form.item_sep, form.kv_sep)
        return config

    def _is_option(self, override: Override) -> bool:
        """Return whether `override` changes the defaults list, by the same rule as Hydra."""
        return self.repository.group_exists(override.key_or_group) and not isinstance(override.value(), dict)

    def _keep(
        self, key: tuple[Any, ...], config_name: str | None, chosen: list[str], *rest: Any, **options: Any
    ) -> bool:
        """Compose a config with the overrides `chosen`, and add it to the cache; return whether it was added.

        The config is not added if it depends on more than the option files, or if it cannot be composed. The caller
        then composes the config with all overrides, without the cache, so that an error refers to what was typed.

        Args:
            key: the result of `_key`, under which the config is cached.
            config_name: the name of the root config.
            chosen: the overrides that choose options, such as `optimizer=adam`.
            rest: further arguments for Hydra's config loader.
            options: further keyword arguments for Hydra's config loader.
        """
        before = OptionFiles.sets_hydra, OptionFiles.is_constant
        OptionFiles.sets_hydra, OptionFiles.is_constant = False, True
        try:
            config = super()._load_configuration_impl(config_name, chosen, *rest, **options)
            sets_hydra, is_constant = OptionFiles.sets_hydra, OptionFiles.is_constant
        except Exception:
            return False
        finally:
            OptionFiles.sets_hydra, OptionFiles.is_constant = before
        if config.hydra.searchpath or not is_constant:
            return False
        while len(_kept) >= _MAX_KEPT:
            del _kept[next(iter(_kept))]
        _kept[key] = config, sets_hydra
        return True

    def _key(self, config_name: str | None, run_mode: RunMode, chosen: list[str]) -> tuple[Any, ...] | None:
        """Return the key of a config in the cache; None if the config cannot be cached.

        The key contains everything on which the config depends. This includes the size and the time of the last change
        of each option file, and the options that were registered with Hydra, for example by a saved config.
        """
        sources = [(source.scheme(), source.path) for source in self.get_sources()]
        if not {scheme for scheme, _ in sources} <= {"pkg", "structured", OptionFiles.scheme()}:
            return None
        try:
            registered = list(_registered(ConfigStore.instance().repo, ()))
        except Exception:  # of a class that was defined again in a notebook, or has no module
            return None
        if any(names == (f"{config_name}.yaml",) for names, _ in registered):
            return None
        directories = [path for scheme, path in sources if scheme == OptionFiles.scheme()]
        files = list(islice(_entries(directories), _MAX_ENTRIES + 1))
        if len(files) > _MAX_ENTRIES:
            return None
        return (config_name, run_mode, *chosen, JobRuntime.instance().get("name"), *sources, *registered, *files)


def with_several_trackers(overrides: Iterable[str]) -> Iterator[str]:
    for text in overrides:
        if trackers := _TRACKERS.fullmatch(text):
            yield "tracking=several"
            yield f"tracking.names={trackers[1]}"
        else:
            yield text


def _registered(nodes: dict[str, Any], above: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], bytes]]:
    """Yield the path and the pickled content of each option registered with Hydra, except for Hydra's own options."""
    for name, node in nodes.items():
        if isinstance(node, dict):
            yield from _registered(node, (*above, name))
        elif isinstance(node, ConfigNode) and node.provider != "hydra":
            yield (*above, name), pickle.dumps(node)


def _entries(directories: list[str]) -> Iterator[tuple[str, int, int, int]]:
    """Yield path, inode, size and time of the last change of every file and directory below `directories`."""
    for directory in directories:
        with suppress(OSError), os.scandir(directory) as entries:
            for entry in entries:
                with suppress(OSError):  # a link to nowhere
                    status = entry.stat()
                    yield entry.path, status.st_ino, status.st_size, status.st_mtime_ns
                if entry.is_dir():
                    yield from _entries([entry.path])
