"""Checks, reorders and quotes the command line before Hydra parses it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

from runner.config.errors import ABSENT, ConfigError, check, did_you_mean
from runner.config.options import groups, groups_in_defaults, root_keys
from runner.config.other_names import type_instead
from runner.config.overrides import hydra_quoted, override_key

_OVERRIDE = re.compile(r"(?P<key>[~+]{0,2}[\w./@-]+)=(?P<value>.*)", re.DOTALL)
_DELETION = re.compile(r"~[\w./@-]+")
_NUMBER = re.compile(r"[+-]?\d[\w.]*")
_FUNCTION = re.compile(r"(zip|choice|range|interval|glob|tag|sort|shuffle|int|float|str|bool)\(")
"""A pattern for the functions of Hydra that give several values, or convert values."""
_PATHS = ("output_root", "resume", "data.root", "data.file", "model.weights")
_TEXTS = (*_PATHS, "name")
_LISTS_OF_TEXTS = ("data.inputs", "data.targets", "model.freeze", "model.unfreeze")
_LIST_ITEM = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|[^][,'"\s](?:[^][,'"]*[^][,'"\s])?""")
SUMMARY = "--summary"
"""The flag that prints a table of the network instead of training it."""
_SWITCHES = (
    *("--help", "-h", "--hydra-help", "--version", "--resolve", "--run", "-r", "--multirun", "-m"),
    *("--shell-completion", "-sc", SUMMARY),
)
RUN_DIRECTORY = "--run-directory"
"""The flag that sets the run directory. The scheduler of a sweep passes this flag to the jobs."""
_FLAGS_WITH_VALUE = ("--cfg", "-c", "--package", "-p", "--info", "-i", "--config-dir", "-cd", RUN_DIRECTORY)
DETACHED = "--detached"
"""The flag whose value is the file descriptor of a pipe to the command that started this sweep in the background."""

_OTHER_ROOT = "the root config is always conf/config.yaml;", "--config-dir=DIR adds a directory of your own options"
_REFUSED_FLAGS = {
    **dict.fromkeys(("--config-path", "-cp", "--config-name", "-cn"), _OTHER_ROOT),
    "--experimental-rerun": ("it would run what a pickled file says;", "resume=DIR continues a run"),
}
_HYDRA_KEYS = re.compile(r"[~+]*hydra(?:[./@].*)?", re.DOTALL)
_ALLOWED_HYDRA_KEYS = re.compile(r"\+{0,2}hydra\.(verbose|searchpath|sweeper\.params(\.[\w./@-]+)?)")
_HYDRA_REMEDIES = {
    **dict.fromkeys(("run", "sweep", "output_subdir", "output"), "output_root=DIR says where runs are written"),
    **dict.fromkeys(("job_logging", "hydra_logging"), "each run has its log.txt; hydra.verbose=true shows more"),
    **dict.fromkeys(
        ("launcher", "sweeper", "mode"),
        "sweep=OPTION says where the jobs of -m run",
    ),
    "job": "set environment variables in the shell, and the directory with cd",
}
_MOST_NESTED, _MOST_DIGITS, _MOST_CHARACTERS = 20, 300, 100_000


def overrides_first(arguments: Iterable[str]) -> list[str]:
    """Return `arguments` with all overrides before all flags, because Hydra's parser requires contiguous overrides.

    Raises:
        ConfigError: for a flag that is unknown or not allowed, and for a word that is not a valid override.
    """
    words, overrides, flags = list(arguments), [], []
    while words:
        word = words.pop(0)
        if not word.startswith("-"):
            overrides.append(_checked_override(word))
            continue
        flags.append(_checked_flag(word))
        if word in _FLAGS_WITH_VALUE and words and ("=" not in words[0] or word in ("--config-dir", "-cd")):
            flags.append(words.pop(0))
    return [*overrides, *flags]


def _checked_override(word: str) -> str:
    match = _OVERRIDE.fullmatch(word)
    if not match and not _DELETION.fullmatch(word):
        examples = ", ".join(f"{word}={option}" for option in groups().get(word, [])) or "seed=1"
        why = "it is not of the form KEY=VALUE, without spaces around the ="
        raise ConfigError(word, ABSENT, why, f"for example {examples}")
    key, value = (match["key"], match["value"]) if match else (word, "")
    _check_hydra_key(key, value)
    _check_size(key, value)
    if key.lstrip("+") in groups_in_defaults():
        parts = re.split("[/,]", value)
        if value.startswith(("/", "~")) or ".." in parts or any(len(os.fsencode(part)) > 250 for part in parts):
            nearest = did_you_mean(value, groups().get(key, []))
            raise ConfigError(key, value, "an option is a file in its group", nearest)
    return word


def _check_hydra_key(key: str, value: str) -> None:
    """Raise a `ConfigError` if `key` is a Hydra key that has no effect here: Hydra is used only to compose configs."""
    if _HYDRA_KEYS.fullmatch(key) and not _ALLOWED_HYDRA_KEYS.fullmatch(key):
        part = re.split(r"[./@]", f"{key}.")[1]
        remedy = type_instead(key.lstrip("~+")) or _HYDRA_REMEDIES.get(
            part, "only hydra.verbose, hydra.searchpath and hydra.sweeper.params can be set"
        )
        raise ConfigError(key, value or ABSENT, "Hydra only composes the config: this would have no effect", remedy)


def _check_size(key: str, value: str) -> None:
    """Raise a `ConfigError` if `value` is so long or so deeply nested that Hydra's parser would hang or crash."""
    depth = deepest = 0
    for character in value:
        depth += (character in "[{(") - (character in "]})")
        deepest = max(deepest, depth)
    check(deepest <= _MOST_NESTED, key, value, f"it is nested more than {_MOST_NESTED} deep", "use fewer levels")
    is_long = len(value) > _MOST_CHARACTERS
    check(not is_long, key, value, f"it has more than {_MOST_CHARACTERS:,} characters", "put it into an option file")
    digits = key.lstrip("+") not in _TEXTS and re.search(rf"\d{{{_MOST_DIGITS + 1}}}", value)
    check(not digits, key, value, f"it has a number of more than {_MOST_DIGITS} digits", "use fewer digits")


def _checked_flag(word: str) -> str:
    flag, bare = word.partition("=")[0], word.lstrip("-")
    if flag in _REFUSED_FLAGS:
        raise ConfigError(flag, ABSENT, *_REFUSED_FLAGS[flag])
    if flag not in (*_SWITCHES, *_FLAGS_WITH_VALUE):
        key = re.split(r"[=.]", bare)[0]
        dashed = key in root_keys() and f"without dashes: {bare if '=' in bare else f'{bare}=…'}"
        known = [known for known in (*_SWITCHES, *_FLAGS_WITH_VALUE) if known.startswith("--")]
        remedy = dashed or type_instead(flag.lstrip("-")) or did_you_mean(flag, known)
        raise ConfigError(flag, ABSENT, "there is no such flag;", remedy)
    return word


def quoted(argument: str, sweep: bool) -> str:
    """Return an override in the form that Hydra's parser needs: its value is quoted where it would be misread.

    For example, Hydra would read the 16 in `precision=16` as a number, but it is the name of an option. A path may
    contain characters that Hydra would reject; a `~` at its beginning is expanded. `GROUP=null` becomes `~GROUP`.

    Args:
        argument: the override; an argument that is not of the form `KEY=VALUE` is returned unchanged.
        sweep: whether the override belongs to a sweep, where commas separate several values.

    Raises:
        ConfigError: if the user after a `~` does not exist, or a path is too long.
    """
    match = _OVERRIDE.fullmatch(argument)
    if match is None:
        return argument
    key, value = match["key"], match["value"]
    name = key.lstrip("+")
    if name in groups_in_defaults():
        if value == "null":
            return f"~{name}"  # Hydra's syntax for a group without an option
        is_number = [bool(_NUMBER.fullmatch(part)) or _is_literal(part) for part in value.split(",")]
        parts = [
            hydra_quoted(part) if number else part for part, number in zip(value.split(","), is_number, strict=True)
        ]
        return f"{key}={','.join(parts)}"
    if name in _LISTS_OF_TEXTS and value.startswith("["):  # the column 1_0 is not the column 10
        return f"{key}={_LIST_ITEM.sub(_quoted_literal, value)}"
    if value[:1] in "'\"[{" or (sweep and _FUNCTION.match(value)):
        return argument
    parts = value.split(",") if sweep else [value]
    return f"{key}={','.join(_text(name, part) for part in parts)}"


def _quoted_literal(item: re.Match[str]) -> str:
    return hydra_quoted(item[0]) if _is_literal(item[0]) or item[0] == "null" else item[0]


def _text(key: str, value: str) -> str:
    """Return `value`, quoted if Hydra's grammar would misread or reject it. `key` must not be a config group."""
    if key in _PATHS:
        value = _checked_path(key, value)
    is_text = key in _TEXTS and (_is_literal(value) or not re.fullmatch(r"[\w./${}:-]*", value))
    return hydra_quoted(value) if is_text or not value.isascii() else value


def _checked_path(key: str, value: str) -> str:
    """Return the path `value` with `~` replaced by the home directory, because a shell does not replace `~` after `=`.

    Raises:
        ConfigError: if the user after the `~` does not exist, or the path or one of its parts is too long.
    """
    path = os.path.expanduser(value)
    user = value.partition("/")[0]
    unknown = path.startswith("~")
    check(not unknown, key, value, f"there is no user {user[1:]}", f"for a file of this name: {key}=./{value}")
    parts_fit = all(len(os.fsencode(part)) <= 255 for part in path.split("/"))
    fits = parts_fit and len(os.fsencode(path)) < 4096
    check(fits, key, value, "a path has at most 4096 bytes, and each name in it at most 255", "shorten it")
    return path


def _is_literal(value: str) -> bool:
    """Return whether Hydra would convert the text `value` to a number or a boolean."""
    try:
        float(value)
    except ValueError:
        return value.lower() in ("true", "false")
    return True


def is_sweep_option(override: str) -> bool:
    """Return whether an override sets an option of the sweep itself, such as `sweep=local` or `sweep.slots=2`."""
    return override_key(override).partition(".")[0] == "sweep"


def override_value(arguments: Iterable[str], key: str) -> str | None:
    """Return the value of the last override of `key` in `arguments`, without quotes; None if there is no override.

    `key=value`, `+key=value` and `++key=value` are the same here; `~key=value` deletes the key, and sets no value.
    """
    matches = filter(None, map(_OVERRIDE.fullmatch, arguments))
    values = [match["value"] for match in matches if match["key"].lstrip("+") == key]
    value = values[-1] if values else None
    return value[1:-1] if value and len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value


def without_flag(arguments: list[str], flag: str) -> list[str]:
    """Return `arguments` without `flag` and its value."""
    kept, words = [], iter(arguments)
    for word in words:
        if word == flag:
            next(words, None)
        elif not word.startswith(f"{flag}="):
            kept.append(word)
    return kept


def refuse_usage(message: str) -> NoReturn:
    """Raise a `ConfigError` for an error message of argparse, which has the form `argument --flag/-f: reason`."""
    flag, _, why = message.removeprefix("argument ").partition(": ")
    names = [name for name in flag.split("/") if name.startswith("--")] or [flag]
    raise ConfigError(names[0], ABSENT, why or message, "--help explains the flags")


def run_directory(arguments: list[str], is_sweep: bool) -> Path | None:
    """Return the absolute path of `--run-directory`; None if the flag was not typed.

    Raises:
        ConfigError: if the flag has no value or an invalid path, or if `-m` or `resume=PATH` already determines the
            directory.
    """
    value = flag_value(arguments, RUN_DIRECTORY)
    typed = any(word.partition("=")[0] == RUN_DIRECTORY for word in arguments)
    check(bool(value) or not typed, RUN_DIRECTORY, ABSENT, "it has no value", f"{RUN_DIRECTORY}=DIR")
    if not value:
        return None
    why = "a sweep chooses the directories of its jobs"
    check(not is_sweep, RUN_DIRECTORY, value, why, "output_root=DIR says where the sweep is written")
    why = "resume=RUN continues in the directory of the run"
    check(
        resumed(arguments) is None,
        RUN_DIRECTORY,
        value,
        why,
        f"leave out one of them, or {RUN_DIRECTORY}=RUN resume=auto",
    )
    return Path(os.path.abspath(_checked_path(RUN_DIRECTORY, value)))


def flag_value(arguments: list[str], *names: str) -> str | None:
    """Return the value of the last flag in `arguments` whose name is one of `names`; None if there is no such flag.

    The value is typed as `--flag VALUE` or `--flag=VALUE`.
    """
    found = None
    for i, word in enumerate(arguments):
        flag, equals, value = word.partition("=")
        if flag in names:
            found = value if equals else next(iter(arguments[i + 1 :]), None)
    return found


def resumed(arguments: Iterable[str]) -> Path | None:
    """Return PATH from the override `resume=PATH`, where PATH is a run directory or a checkpoint.

    Return None for `resume=auto`, for `resume=never`, and if there is no such override.

    Raises:
        ConfigError: if the directory does not exist.
    """
    source = override_value(arguments, "resume")
    if source in (None, "auto", "never"):
        return None
    path = _checked_path("resume", source)
    remedy = "choose auto, never, or a run directory (or a checkpoint in one)"
    check(os.path.isdir(path), "resume", source, "there is no such directory", remedy)
    return Path(path)


def overridden_keys(arguments: Iterable[str]) -> set[str]:
    """Return the keys and config groups that a command line sets or deletes."""
    known = (_OVERRIDE.fullmatch(text) or _DELETION.fullmatch(text) for text in arguments)
    return {override_key(match[0]) for match in known if match}
