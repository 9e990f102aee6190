"""Checks, reorders and quotes the command line before Hydra parses it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from runner.config.errors import ABSENT, ConfigError, check, did_you_mean
from runner.config.options import chosen_groups, groups, root_keys

_OVERRIDE = re.compile(r"(?P<key>[~+]{0,2}[\w./@-]+)=(?P<value>.*)", re.DOTALL)
_DELETION = re.compile(r"~[\w./@-]+")
_NUMBER = re.compile(r"[+-]?\d[\w.]*")
_PATHS = ("output_root", "resume", "data.root", "model.weights")
_TEXTS = (*_PATHS, "name")
_SWITCHES = (
    *("--help", "-h", "--hydra-help", "--version", "--resolve", "--run", "-r", "--multirun", "-m"),
    *("--shell-completion", "-sc"),
)
_FLAGS_WITH_VALUE = (
    *("--cfg", "-c", "--package", "-p", "--info", "-i", "--config-path", "-cp", "--config-name", "-cn"),
    *("--config-dir", "-cd", "--experimental-rerun"),
)


def overrides_first(arguments: Iterable[str]) -> list[str]:
    """Return `arguments` with the overrides first: Hydra's parser requires them to be contiguous.

    Raises:
        ConfigError: for an unknown flag, and for a word that is not an override.
    """
    words, overrides, flags = list(arguments), [], []
    while words:
        word = words.pop(0)
        if not word.startswith("-"):
            overrides.append(_checked_override(word))
            continue
        flags.append(_checked_flag(word))
        if word in _FLAGS_WITH_VALUE and words and "=" not in words[0]:
            flags.append(words.pop(0))
    return [*overrides, *flags]


def _checked_override(word: str) -> str:
    known = _OVERRIDE.fullmatch(word) or _DELETION.fullmatch(word)
    examples = ", ".join(f"{word}={option}" for option in groups().get(word, [])) or "seed=1"
    why = "it is not of the form KEY=VALUE, without spaces around the ="
    check(bool(known), word, ABSENT, why, f"for example {examples}")
    return word


def _checked_flag(word: str) -> str:
    flag, bare = word.partition("=")[0], word.lstrip("-")
    if flag not in (*_SWITCHES, *_FLAGS_WITH_VALUE):
        key = re.split(r"[=.]", bare)[0]
        dashed = key in root_keys() and f"without dashes: {bare if '=' in bare else f'{bare}=…'}"
        known = [known for known in (*_SWITCHES, *_FLAGS_WITH_VALUE) if known.startswith("--")]
        raise ConfigError(flag, ABSENT, "there is no such flag;", dashed or did_you_mean(flag, known))
    return word


def quoted(argument: str, sweep: bool) -> str:
    """Quote the value of an override for Hydra's grammar.

    In `precision=16` the number is the name of an option, and a path may contain any character.

    Args:
        sweep: whether a comma separates the values of a sweep.
    """
    match = _OVERRIDE.fullmatch(argument)
    if match is None:
        return argument
    key, value = match["key"], match["value"]
    name = key.lstrip("+")
    if name in chosen_groups():
        if value == "null":
            return f"~{name}"  # Hydra's syntax for a group without an option
        return f"{key}={','.join(_quote(part) if _NUMBER.fullmatch(part) else part for part in value.split(','))}"
    if value[:1] in "'\"[{":
        return argument
    parts = value.split(",") if sweep else [value]
    return f"{key}={','.join(_text(name, part) for part in parts)}"


def _text(key: str, value: str) -> str:
    """Quote one value of `key`, which is not a config group, if Hydra's grammar does not allow its characters."""
    if key in _PATHS:
        value = os.path.expanduser(value)  # the shell does not expand a ~ after the =
    must_quote = not value.isascii() or (key in _TEXTS and not re.fullmatch(r"[\w./${}:-]*", value))
    return _quote(value) if must_quote else value


def _quote(value: str) -> str:
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'" if value else "''"


def override_value(arguments: Iterable[str], key: str) -> str | None:
    """Return the unquoted value of `key` in `arguments`; None if it is not overridden."""
    matches = [match for argument in arguments if (match := _OVERRIDE.fullmatch(argument)) and match["key"] == key]
    return matches[-1]["value"].strip("'\"") if matches else None


def flag_value(arguments: list[str], *names: str) -> str | None:
    """Return the value of a flag, given as `--flag VALUE` or `--flag=VALUE`; None if it is not given."""
    for i, word in enumerate(arguments):
        flag, equals, value = word.partition("=")
        if flag in names:
            return value if equals else next(iter(arguments[i + 1 :]), None)
    return None


def resumed(arguments: Iterable[str]) -> Path | None:
    """Return the path given as `resume=PATH`, a run directory or a checkpoint; None for `auto`, `never` or no value.

    Raises:
        ConfigError: if there is no such directory.
    """
    source = override_value(arguments, "resume")
    if source in (None, "auto", "never"):
        return None
    path = Path(source).expanduser()
    remedy = "choose auto, never, or a run directory (or a checkpoint in one)"
    check(source != "" and path.is_dir(), "resume", source, "there is no such directory", remedy)
    return path


def overridden_keys(arguments: Iterable[str]) -> set[str]:
    """Return the keys and config groups that a command line sets or deletes."""
    known = (_OVERRIDE.fullmatch(text) or _DELETION.fullmatch(text) for text in arguments)
    return {match[0].partition("=")[0].lstrip("+~") for match in known if match}
