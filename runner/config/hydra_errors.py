"""Translates errors of Hydra and OmegaConf into config errors, which name key, value, cause and remedy."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Collection, Mapping

from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException

from runner.config.errors import ABSENT, ConfigError, did_you_mean
from runner.config.options import option_files, option_keys, root_keys
from runner.config.other_names import type_instead
from runner.config.user_code import chosen_by_file, is_file


def explain(error: Exception) -> str:
    """Return the text that is shown to the user for `error`: at most eight lines if it cannot be translated."""
    translated = config_error(error)
    return "\n".join(_lines(error)[:8]) if translated is None else str(translated)


def config_error(error: Exception) -> ConfigError | None:
    """Return a config error that says the same as `error`; None if `error` cannot be translated."""
    if isinstance(error, ConfigError):
        return error
    translations = (_no_such_option, _no_such_key, _several_values, _syntax_error, _unresolved)
    return next((found for translate in translations if (found := translate(error)) is not None), None)


def _lines(error: Exception) -> list[str]:
    text = str(error).partition("Config search path")[0]
    return [line for line in text.splitlines() if line.strip()]


def _no_such_option(error: Exception) -> ConfigError | None:
    if not isinstance(error, MissingConfigException) or not error.missing_cfg_file:
        return None
    group, _, option = error.missing_cfg_file.removesuffix(".yaml").rpartition("/")
    if group not in root_keys():
        return None
    if is_file(f"{group}={option}"):  # a typed one never gets here
        return chosen_by_file(group, option)
    names = list(option_files().get(group, []))
    names += sorted(name for name in {*(error.options or [])} - {*names} if name[0] != "_")  # of --config-dir
    is_switch = option.lower() in ("true", "false", "yes", "no", "on", "off")
    remedy = f"choose from: {', '.join(names)}" if is_switch else did_you_mean(option, names)
    for pattern, instead in _BY_KEY.items():
        if found := re.fullmatch(pattern, f"{group}={option}"):
            remedy = instead.format(*found.groups())
            break
    if os.path.isfile(f"{option}.py"):
        remedy = f"for the file: {group}={option}.py"
    if names == ["default"]:  # there is nothing to choose in this group
        keys = ", ".join(f"{group}.{key}" for key in sorted(option_keys(group)["default"]))
        command = option_files()[group]["default"].read_text(encoding="utf-8").partition("\n")[0]
        remedy = f"set its keys: {keys}; for example: {command.partition(f'{group}=default ')[2]}"
    return ConfigError(group, option, "there is no such option;", remedy)


_BY_KEY = {
    "device=gpu": "choose device=cuda (NVIDIA or AMD), device=mps (Apple), or device=auto for whichever there is",
    r"accumulation=([1-9]\d*)": "for any other number: accumulation.steps={}",
    r"model=resnet(34|101|152)": "model=resnet50 model.depth={}",
    r"model=(.+\d.*|.+_.+|alexnet|googlenet)": "a network of torchvision: model=torchvision model.name={}",
}
"""For each pattern of a `GROUP=OPTION` that does not exist: what to type instead."""


def _no_such_key(error: Exception) -> ConfigError | None:
    match = re.search(r"[Cc]ould not override '([^']+)'", str(error))
    node = getattr(error.__context__, "parent_node", None)  # of OmegaConf's error: it does not have the key
    chosen = {str(name) for name in node if name != "_target_"} if isinstance(node, Mapping) else set()
    return match and ConfigError(match[1], ABSENT, "there is no such key;", _other_key(match[1], chosen))


def _other_key(key: str, chosen: Collection[str]) -> str:
    """Return a remedy for an unknown key: similar keys, other options that have the key, or all valid keys.

    Args:
        key: the unknown key, such as `optimizer.lrr`.
        chosen: the keys of the option that is chosen in its config group; empty if they are not known.
    """
    group, _, name = key.partition(".")
    keys = option_keys(group)
    if not keys:
        return type_instead(key) or did_you_mean(group, root_keys())
    if owners := [f"{group}={option}" for option, names in keys.items() if name in names]:
        return f"it is a key of {', '.join(owners)}; another {group} is chosen"
    known = {name for names in keys.values() for name in names}
    if difflib.get_close_matches(name.lower(), known, n=1):
        return did_you_mean(name, known, f"{group}.")
    return type_instead(key) or did_you_mean(name, chosen or known, f"{group}.")


def _several_values(error: Exception) -> ConfigError | None:
    match = re.search(r"(?:Ambiguous value for argument|Sweep parameters) '(.+?)=(.*)'", str(error))
    if match is None:
        return None
    key, values = match[1], match[2].replace("'", "")
    remedy = "for a sweep, add -m (in Python: runner.sweep); a list is typed in brackets"
    return ConfigError(key, values, "a run takes one value", remedy)


def _syntax_error(error: Exception) -> ConfigError | None:
    if not isinstance(error, OverrideParseException):
        return None
    grammar = "no viable|mismatched|extraneous|missing"
    found = next((f" ({line.partition(' expecting ')[0]})" for line in _lines(error) if re.match(grammar, line)), "")
    why = found.replace("'<EOF>'", "at its end")
    remedy = "use brackets and quotes in pairs; quote a text with spaces or any of , : = [ ] { } as KEY=\"'TEXT'\""
    return ConfigError(error.override, ABSENT, f"it cannot be parsed{why}", remedy)


def _unresolved(error: Exception) -> ConfigError | None:
    if not isinstance(error, OmegaConfBaseException) or not error.full_key:
        return None
    remedy = "give it a plain value; ${KEY} is the value of another key, and ${eval:'${KEY} * 2'} computes"
    return ConfigError(error.full_key, ABSENT, _lines(error)[0], remedy)
