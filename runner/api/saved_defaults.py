"""The saved config of a run as the root config of `resume=PATH`, which overrides can change.

A saved config may come from somebody else. It is therefore treated as data: its values are checked like values on the
command line, but Hydra resolves no interpolations and composes no options in it, and it cannot change Hydra's settings.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runner.config.composition import register_saved
from runner.config.errors import ABSENT, check, did_you_mean, errors_under
from runner.config.overrides import override_key
from runner.config.schema import checked_values, load_class, option_fields
from runner.config.user_code import expanded
from runner.run import CONFIG_GROUPS, WORKLOAD_INPUTS, Run
from runner.storage.saved_run import saved_config
from runner.system.secrets import MASK
from runner.workloads.base import Workload

log = logging.getLogger(__name__)

_GROUPS = CONFIG_GROUPS | WORKLOAD_INPUTS | {"workload": Workload}


def saved_root(source: Path, overrides: Sequence[str]) -> str:
    """Register the saved config of a run or checkpoint with Hydra as a root config, and return its name.

    Raises:
        ConfigError: if the config cannot be read, or has an invalid value that `overrides` do not replace.
    """
    saved = saved_config(source)
    for reason in saved.unreadable:
        log.warning("%s; the config is read from %s", reason, saved.file)
    overridden = set(map(override_key, expanded(overrides, is_new=False)))
    config = {key: _plain(value, key, overridden) for key, value in saved.values.items()}
    _check(config, overridden)
    return register_saved(config, _GROUPS, {*WORKLOAD_INPUTS} - overridden)


def _plain(value: Any, key: str, overridden: set[str]) -> Any:
    """Return the saved `value` of the dotted `key`, with None for each value in it that the command line overrides."""
    if key in overridden:
        return None
    if isinstance(value, dict):
        return {name: _plain(value[name], f"{key}.{name}", overridden) for name in value}
    if isinstance(value, list):
        return [_plain(element, key, set()) for element in value]
    if isinstance(value, str):
        reference = "${" in value or value == "???"
        why = "references in a saved config are not resolved"
        check(not reference, key, value, why, f"type it again: {key}='{value}'")
        hidden = "it contains a credential, which is not saved"
        check(MASK not in value, key, value, hidden, f"type it again: {key}=…, or {key}='${{oc.env:NAME}}'")
    return value


def _check(config: dict[str, Any], overridden: set[str]) -> None:
    """Check that every key is an option of the run or of a component, and that each value has the right type.

    Components may reject saved values that they do not trust, or replace them: see `untrusted_values` of `Env`.
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
                checked_values(cls, saved)
                untrusted_values = getattr(cls, "untrusted_values", None)
                node |= untrusted_values(saved) if untrusted_values is not None else {}
    checked_values(Run, _not_overridden({key: config[key] for key in options if key in config}, "", overridden))


def _not_overridden(node: dict[str, Any], prefix: str, overridden: set[str]) -> dict[str, Any]:
    return {name: value for name, value in node.items() if name != "_target_" and f"{prefix}{name}" not in overridden}
