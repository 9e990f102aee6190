"""Overrides, which are typed on the command line as `KEY=VALUE`: their checks, and their form for Hydra's grammar."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable
from pathlib import Path

from runner.config.errors import ABSENT, ConfigError, check
from runner.config.options import groups_in_defaults, option_files, root_keys
from runner.config.other_names import type_instead

LOCATION_KEYS = ("name", "output_root", "resume")
"""The config keys that only determine where a run is saved."""

HYDRA_KEYS = ("verbose", "searchpath", "sweeper.params")
"""The keys of Hydra that have an effect here, where Hydra only composes configs."""

_OVERRIDE = re.compile(r"(?P<key>[~+]{0,2}[\w./@-]+)=(?P<value>.*)", re.DOTALL)
_DELETION = re.compile(r"~[\w./@-]+")
_NUMBER = re.compile(r"[+-]?\d[\w.]*")
_FUNCTION = re.compile(r"(zip|choice|range|interval|glob|tag|sort|shuffle|int|float|str|bool)\(")
"""A pattern for the functions of Hydra that give several values, or convert values."""
_PATHS = ("output_root", "resume", "data.root", "data.file", "model.weights")
_TEXTS = (*_PATHS, "name")
_LISTS_OF_TEXTS = ("data.inputs", "data.targets", "model.freeze", "model.unfreeze")
_LIST_ITEM = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|[^][,'"\s](?:[^][,'"]*[^][,'"\s])?""")
_PARTS_WITH_REFERENCES = re.compile(r"(?:\$\{(?:[^{}]|\{[^{}]*\})*\}|[^,])+")
_NESTED_REFERENCE = re.compile(r"\$\{[^}]*\$\{|\$\{eval\b")
_QUOTED = re.compile(r"""(['"])([\w.+-]+)\1""")
_ALLOWED_HYDRA_KEY = re.compile(r"hydra\.(verbose|searchpath|sweeper\.params(\.[\w./@-]+)?)")


def override_key(override: str) -> str:
    """Return the key or the config group of an override: `++optimizer@other=sgd` has the key `optimizer@other`."""
    return override.lstrip("+~").partition("=")[0]


def override_value(arguments: Iterable[str], key: str) -> str | None:
    """Return the value of the last override of `key` in `arguments`, without quotes; None if there is none."""
    matches = filter(None, map(_OVERRIDE.fullmatch, arguments))
    values = [match["value"] for match in matches if match["key"].lstrip("+") == key]
    value = values[-1] if values else None
    return value[1:-1] if value and len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value


def replaced(overrides: Iterable[str], *others: str) -> list[str]:
    """Return `overrides` followed by `others`, which replace overrides of the same group: `parallel=single` all of
    `parallel`, but `parallel.stages=2` none.
    """
    names = {text.partition("=")[0] for text in others}
    return [*(text for text in overrides if re.split(r"[.@]", override_key(text))[0] not in names), *others]


def is_sweep_option(override: str) -> bool:
    """Return whether an override sets an option of the sweep itself, such as `sweep=local` or `sweep.slots=2`."""
    return override_key(override).partition(".")[0] == "sweep"


def resumed(overrides: Iterable[str]) -> Path | None:
    """Return PATH, a run directory or a checkpoint, from the override `resume=PATH`; None if no directory is named.

    Raises:
        ConfigError: if the directory does not exist.
    """
    source = override_value(overrides, "resume")
    if source in (None, "auto", "never"):
        return None
    path = Path(checked_path("resume", source))
    remedy = "choose auto, never, or a run directory (or a checkpoint in one)"
    check(bool(source) and path.is_dir(), "resume", source, "there is no such directory", remedy)
    return path


def checked_override(word: str) -> str:
    """Return `word`, which Hydra may then parse.

    Raises:
        ConfigError: if it is not of the form KEY=VALUE, or sets a key of Hydra that has no effect here.
    """
    match = _OVERRIDE.fullmatch(word)
    if not match and not _DELETION.fullmatch(word):
        examples = [f"{word}={option}" for option in option_files().get(word, [])]
        examples = examples or [f"{group}={word}" for group, files in option_files().items() if word in files]
        examples = [f"workload={word}"] if word.endswith(".py") else examples
        why = "it is a path" if os.path.exists(word) else "there is no such key or run"
        why = "it has no value" if word.partition(".")[0] in root_keys() else why
        remedy = f"type KEY=VALUE, without spaces around the =: {', '.join(examples) or 'seed=1'}"
        raise ConfigError(word, ABSENT, why, remedy)
    key, value = (match["key"], match["value"]) if match else (word, "")
    name = key.lstrip("~+")
    allowed = key[0] != "~" and _ALLOWED_HYDRA_KEY.fullmatch(name)
    if re.match(r"hydra(?:[./@]|$)", name) and not allowed:
        remedy = type_instead(name) or f"only {', '.join(f'hydra.{each}' for each in HYDRA_KEYS)} can be set"
        raise ConfigError(key, value or ABSENT, "Hydra only composes the config: this would have no effect", remedy)
    return word


def quoted(word: str, sweep: bool) -> str:
    """Return an override in the form that Hydra's parser needs: its value is quoted where it would be misread.

    For example, Hydra would read the 16 in `precision=16` as a number, but it is the name of an option. A `~` at the
    beginning of a path is expanded. `GROUP=null` becomes `~GROUP`. In a `sweep`, commas separate several values.

    Raises:
        ConfigError: if the user after a `~` does not exist, or a path is too long.
    """
    match = _OVERRIDE.fullmatch(word)
    if match is None:
        return word
    key, value = match["key"], match["value"]
    name = key.lstrip("+")
    if sweep and _FUNCTION.match(value):
        return word
    if name in groups_in_defaults():
        if value == "null":
            return f"~{name}"  # Hydra's syntax for a group without an option
        parts = [hydra_quoted(x) if _NUMBER.fullmatch(x) or _is_literal(x) else x for x in value.split(",")]
        return f"{key}={','.join(parts)}"
    if name in _LISTS_OF_TEXTS and value.startswith("["):  # the column 1_0 is not the column 10
        return f"{key}={_LIST_ITEM.sub(_quoted_item, value)}"
    if value[:1] in "'\"[{":
        return word
    if _NESTED_REFERENCE.search(value):  # which Hydra's grammar does not know
        parts = _PARTS_WITH_REFERENCES.findall(value) if sweep else [value]
        # in double quotes: OmegaConf reads the override, too, and knows no escapes
        shown = [hydra_quoted(part) if '"' in part else f'"{part}"' if "${" in part else part for part in parts]
        return f"{key}={','.join(shown)}"
    parts = value.split(",") if sweep else [value]
    return f"{key}={','.join(_quoted_text(name, part) for part in parts)}"


def _quoted_item(item: re.Match[str]) -> str:
    before = item.string[: item.start()]
    is_in_list = before.count("[") > before.count("]")  # in a sweep, there may be others: KEY=[a],null
    return hydra_quoted(item[0]) if is_in_list and (_is_literal(item[0]) or item[0] == "null") else item[0]


def _quoted_text(key: str, value: str) -> str:
    if key in _PATHS:
        value = checked_path(key, value)
    is_text = key in _TEXTS and (_is_literal(value) or not re.fullmatch(r"[\w./${}:-]*", value))
    return hydra_quoted(value) if is_text or not value.isascii() else value


def _is_literal(value: str) -> bool:
    """Return whether Hydra would convert the text `value` to a number or a boolean."""
    try:
        float(value)
    except ValueError:
        return value.lower() in ("true", "false")
    return True


def checked_path(key: str, value: str) -> str:
    """Return the path `value` with `~` replaced by the home directory, because a shell does not replace `~` after `=`.

    Raises:
        ConfigError: if the user after the `~` does not exist, or the path or one of its parts is too long.
    """
    path = os.path.expanduser(value)
    why = f"there is no user {value[1:].partition('/')[0]}"
    check(not path.startswith("~"), key, value, why, f"for a file of this name: {key}=./{value}")
    if len(os.fsencode(path)) >= 4096 or any(len(os.fsencode(part)) > 255 for part in path.split("/")):
        raise ConfigError(key, value, "a path has at most 4096 bytes, and each name in it at most 255", "shorten it")
    return path


def canonical_override(override: str) -> str:
    """Return an override without `+` and without needless quotes: `++seed='1'` is `seed=1`. `~seed` is not changed."""
    return _QUOTED.sub(r"\2", override.lstrip("+"))


def hydra_quoted(value: str) -> str:
    # Hydra takes backslashes for escapes only if a quote follows them.
    return "'" + re.sub(r"(\\*)('|\Z)", lambda found: found[1] * 2 + "\\'" * bool(found[2]), value) + "'"


def text_override(key: str, value: object) -> str:
    """Return `KEY=VALUE` for a text, such as a path, as it is typed in a shell: in all quotes that it needs."""
    text, plain = str(value), r"[\w./][\w./+=-]*" if key in _TEXTS else r"[A-Za-z_./][\w./+-]*"
    word = f"{key}={text if re.fullmatch(plain, text, re.ASCII) else hydra_quoted(text)}"
    return f'"{word}"' if "'" in word and not set(word) & set('"$`\\!') else shlex.quote(word)


def typed_path(path: Path) -> str:
    """Return the relative path of `path` as it is typed in a shell, with `./` if its first character has a meaning."""
    relative = os.path.relpath(path)
    return shlex.quote(relative if relative[0].isalnum() or relative[0] in "./_" else f"./{relative}")


def as_typed(value: object) -> str:
    """Return the text of a config value as it is typed in an override: `null`, `true`, `0.1`, `[16,32]`."""
    if isinstance(value, list | tuple):
        return f"[{','.join(map(as_typed, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{as_typed(inner)}' for key, inner in value.items())}}}"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
