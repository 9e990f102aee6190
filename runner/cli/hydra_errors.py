"""Hydra's and OmegaConf's errors in this project's words: which key, what was got, why not, what to do."""

from __future__ import annotations

import re

from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException

from runner.config.errors import ABSENT, ConfigError, did_you_mean
from runner.config.options import groups, option_keys, root_keys


def explain(error: Exception) -> str:
    """What to tell of `error`: ten lines at the most."""
    for told in (_no_such_option, _no_such_key, _several_values, _chosen_twice, _unreadable, _unresolved):
        if (found := told(error)) is not None:
            return str(found)
    return "\n".join(_lines(error)[:8])


def _lines(error: Exception) -> list[str]:
    text = str(error).partition("Config search path")[0]
    return [line for line in text.splitlines() if line.strip()]


def _no_such_option(error: Exception) -> ConfigError | None:
    if not isinstance(error, MissingConfigException) or not error.missing_cfg_file:
        return None
    group, _, option = error.missing_cfg_file.removesuffix(".yaml").rpartition("/")
    if group not in root_keys():
        return None
    nearest = did_you_mean(option, groups().get(group, []))
    any_number = group == "accumulation" and option.isdigit()
    remedy = f"any other number: accumulation.steps={option}" if any_number else nearest
    return ConfigError(group, option, "there is no such option;", remedy)


def _no_such_key(error: Exception) -> ConfigError | None:
    match = re.search(r"[Cc]ould not override '([^']+)'", str(error))
    return match and ConfigError(match[1], ABSENT, "there is no such key;", _other_key(match[1]))


def _other_key(key: str) -> str:
    """What `key`, which the chosen option does not have, could have meant."""
    group, _, name = key.partition(".")
    if group == "hydra":
        return "python -m runner --cfg hydra shows what there is"
    keys = {option: option_keys(group, option) for option in groups().get(group, [])}
    if not name or not keys:
        return did_you_mean(group, root_keys())
    if having := [f"{group}={option}" for option, names in keys.items() if name in names]:
        return f"it is a key of {', '.join(having)}; another {group} is chosen"
    return did_you_mean(name, {name for names in keys.values() for name in names}, f"{group}.")


def _several_values(error: Exception) -> ConfigError | None:
    match = re.search(r"Ambiguous value for argument '(.+?)=(.*)'", str(error))
    if match is None:
        return None
    key, values = match[1], match[2].replace("'", "")
    a_list = "" if key in groups() else f"; for a list: {key}=[{values}]"
    return ConfigError(key, values, "one run takes one value", f"for a sweep, add -m{a_list}")


def _chosen_twice(error: Exception) -> ConfigError | None:
    match = re.match(r"Multiple values for (\S+)\. |(\S+) appears more than once", str(error))
    if match is None:
        return None
    group = match[1] or match[2]
    return ConfigError(group, ABSENT, "an option of it is chosen already", f"without the +: {group}=…")


def _unreadable(error: Exception) -> ConfigError | None:
    if not isinstance(error, OverrideParseException):
        return None
    grammar = "no viable|mismatched|extraneous|missing"
    why = next((f" ({line})" for line in _lines(error) if re.match(grammar, line)), "")
    pairs = "brackets and quotes come in pairs; a text with blanks or , : = [ ] { } goes as KEY=\"'TEXT'\""
    return ConfigError(error.override, ABSENT, f"it cannot be read{why}", pairs)


def _unresolved(error: Exception) -> ConfigError | None:
    if not isinstance(error, OmegaConfBaseException) or not error.full_key:
        return None
    plain = "give it a plain value; ${…} stands for another key's value"
    return ConfigError(error.full_key, ABSENT, _lines(error)[0], plain)
