"""Registers the saved config of a run with Hydra, so that overrides can change it when `resume=PATH` resumes the run.

A saved config may come from somebody else. It is therefore treated as data: its values are checked like values on the
command line, but Hydra resolves no interpolations and composes no options in it, and it cannot change Hydra's settings.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from runner.cli.arguments import overridden_keys
from runner.config.errors import ABSENT, ConfigError, check, did_you_mean, errors_under
from runner.config.options import CONF
from runner.config.schema import checked_schema, load_class, option_fields
from runner.run import CONFIG_GROUPS, WORKLOAD_INPUTS, Run
from runner.storage.saved_config import UnreadableConfigError
from runner.storage.saved_run import saved_config
from runner.system.secrets import MASK
from runner.workloads.base import Workload

log = logging.getLogger(__name__)

_NAME = "saved"
_GROUPS = CONFIG_GROUPS | WORKLOAD_INPUTS | {"workload": Workload}


def register_saved(source: Path, arguments: Iterable[str]) -> str:
    """Register the saved config of `source` with Hydra as a root config, and return the name of this root config.

    Args:
        source: a run directory, or a checkpoint in one.
        arguments: the command line. A saved value that the command line overrides need not be valid.

    Raises:
        ConfigError: if the config cannot be read, or has an invalid value that is not overridden.
    """
    try:
        saved = saved_config(source)
    except UnreadableConfigError as error:
        remedy = "name a run directory, or a checkpoint in one"
        raise ConfigError(
            "resume", str(source), f"there is no run whose config can be read ({error})", remedy
        ) from None
    for reason in saved.unreadable:
        log.warning("%s; the config is read from %s", reason, saved.file)
    overridden = overridden_keys(arguments)
    config = {key: _plain(value, key, overridden) for key, value in saved.values.items()}
    _check(config, overridden)
    _store(config, overridden)
    return _NAME


def _plain(value: Any, key: str, overridden: set[str]) -> Any:
    """Return `value`, with None in place of each value that the command line overrides.

    Args:
        value: a saved value; in a dict, the values are replaced at any depth.
        key: the dotted key of `value` in the config.
        overridden: the dotted keys that the command line overrides.

    Raises:
        ConfigError: if a string that is not overridden is a reference (`${…}`), a missing value (`???`) or a hidden
            credential (`***`). The user has to type such a value again.
    """
    if key in overridden:
        return None
    if isinstance(value, dict):
        return {name: _plain(value[name], f"{key}.{name}", overridden) for name in value}
    if isinstance(value, list):
        for element in value:
            _plain(element, key, set())
    if isinstance(value, str):
        reference = "${" in value or value == "???"
        check(
            not reference,
            key,
            value,
            "references in a saved config are not resolved",
            f"type it again: {key}='{value}'",
        )
        hidden = "it contains a credential, which is not saved"
        check(MASK not in value, key, value, hidden, f"type it again: {key}=…, or {key}='${{oc.env:NAME}}'")
    return value


def _check(config: dict[str, Any], overridden: set[str]) -> None:
    """Check that every key is an option of the run or of a component, and that each value has the right type.

    The values of the keys in `overridden` are not checked. Components may reject saved values that they do not trust,
    or replace them in `config`: see `untrusted_values` of `Env`, `Downloadable` and `RemoteTracker`.
    """
    options = [name for name in option_fields(Run) if name not in CONFIG_GROUPS]
    known = [*options, *_GROUPS]
    for key, node in config.items():
        check(key in known, key, ABSENT, "there is no such key;", did_you_mean(key, known))
        if key in _GROUPS and node is not None:
            check(isinstance(node, dict), key, node, "it is not a component", f"choose an option: {key}=…")
            with errors_under(key):
                cls = load_class(node.get("_target_"), _GROUPS[key])
                saved = _not_overridden(node, f"{key}.", overridden)
                checked_schema(cls, saved)
                untrusted_values = getattr(cls, "untrusted_values", None)
                node |= untrusted_values(saved) if untrusted_values is not None else {}
    own = {key: value for key, value in config.items() if key in options}
    checked_schema(Run, _not_overridden(own, "", overridden))


def _not_overridden(node: dict[str, Any], prefix: str, overridden: set[str]) -> dict[str, Any]:
    return {name: value for name, value in node.items() if name != "_target_" and f"{prefix}{name}" not in overridden}


def _store(config: dict[str, Any], overridden: set[str]) -> None:
    """Register each component with Hydra as an option of its group, and a root config that chooses these options."""
    root: Any = OmegaConf.to_container(OmegaConf.load(CONF / "config.yaml"), resolve=False)
    chosen = {group: _NAME for group in _GROUPS if config.get(group) is not None}
    absent: dict[str, str | None] = dict.fromkeys({*WORKLOAD_INPUTS} - {*chosen, *overridden})
    defaults = [_default(entry, chosen | absent) for entry in root.pop("defaults")]
    store = ConfigStore.instance()
    for group in chosen:
        store.store(group=group, name=_NAME, node=config[group])
    values = {key: value for key, value in config.items() if key not in _GROUPS}
    store.store(name=_NAME, node={"defaults": defaults, **root, **values})


def _default(entry: Any, chosen: dict[str, str | None]) -> Any:
    """Return `entry`, an entry of a defaults list, with its option replaced by the option in `chosen`.

    In an entry of an optional group, such as `optional local`, the option is always replaced by None: the saved config
    already contains the values that the option has set.

    Args:
        entry: a dict `{group: option}`, or a string. A string is returned unchanged.
        chosen: a dict from config groups to options, or to None for no option. If the group of `entry` is not in
            `chosen`, `entry` keeps its option.
    """
    if isinstance(entry, str):
        return entry
    ((group, option),) = entry.items()
    return {group: None if group.startswith("optional ") else chosen.get(group, option)}
