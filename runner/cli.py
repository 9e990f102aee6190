"""The command line before Hydra sees it, and Hydra's errors before the user does."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runner.config import ABSENT, CONF, ConfigError, check, did_you_mean

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


def groups() -> dict[str, list[str]]:
    """The config groups and their options."""
    return {
        folder.name: sorted((path.stem for path in folder.glob("*.yaml")), key=_by_number)
        for folder in sorted(CONF.iterdir())
        if folder.is_dir() and any(folder.glob("*.yaml"))
    }


def overrides_first(arguments: Iterable[str]) -> list[str]:
    """`arguments` in the order that Hydra's parser needs, which takes overrides in one piece only.

    Raises:
        ConfigError: for a flag that is none, and for a word that is no override.
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
    if not _OVERRIDE.fullmatch(word) and not _DELETION.fullmatch(word):
        examples = [f"{word}={option}" for option in groups().get(word, [])] or ["seed=1"]
        raise ConfigError(
            word, ABSENT, "it is no KEY=VALUE, without spaces around the =", f"as in {', '.join(examples)}"
        )
    return word


def _checked_flag(word: str) -> str:
    flag, bare = word.partition("=")[0], word.lstrip("-")
    if flag not in (*_SWITCHES, *_FLAGS_WITH_VALUE):
        key = re.split(r"[=.]", bare)[0]
        dashed = key in _root_keys() and f"without dashes: {bare if '=' in bare else f'{bare}=…'}"
        known = [known for known in (*_SWITCHES, *_FLAGS_WITH_VALUE) if known.startswith("--")]
        raise ConfigError(flag, ABSENT, "there is no such flag;", dashed or did_you_mean(flag, known))
    return word


def quoted(argument: str, sweep: bool) -> str:
    """`argument` as Hydra's grammar wants it: `precision=16` names an option, no number; paths hold any character."""
    match = _OVERRIDE.fullmatch(argument)
    if match is None:
        return argument
    key, value = match["key"], match["value"]
    name = key.lstrip("+")
    if name in _chosen():
        if value == "null":
            return f"~{name}"  # what Hydra has for it
        return f"{key}={','.join(_quote(part) if _NUMBER.fullmatch(part) else part for part in value.split(','))}"
    if value[:1] in "'\"[{":
        return argument
    parts = value.split(",") if sweep else [value]
    return f"{key}={','.join(_text(name, part) for part in parts)}"


def _text(key: str, value: str) -> str:
    """One value of `key`, which is no group; quoted where Hydra's grammar has no such characters."""
    if key in _PATHS:
        value = os.path.expanduser(value)  # as shells do, but not behind a =
    foreign = not value.isascii() or (key in _TEXTS and not re.fullmatch(r"[\w./${}:-]*", value))
    return _quote(value) if foreign else value


def _quote(value: str) -> str:
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'" if value else "''"


def override_value(arguments: Iterable[str], key: str) -> str | None:
    """The value that `arguments` give to `key`, unquoted; None where they do not."""
    found = [
        match["value"] for argument in arguments if (match := _OVERRIDE.fullmatch(argument)) and match["key"] == key
    ]
    return found[-1].strip("'\"") if found else None


def resumed(arguments: Iterable[str]) -> Path | None:
    """The run directory, or the checkpoint in one, that `resume=` names; None where it names none.

    Raises:
        ConfigError: when there is no such directory.
    """
    source = override_value(arguments, "resume")
    if source in (None, "auto", "never"):
        return None
    path = Path(source).expanduser()
    there = source != "" and path.is_dir()
    check(
        there, "resume", source, "there is no such directory", "auto, never, or a run directory, or a checkpoint in one"
    )
    return path


def with_saved(saved: list[str], now: list[str]) -> list[str]:
    """The overrides of a resumed run: those it was started with, less those that are given anew."""
    given = {match["key"].lstrip("+~") for argument in now if (match := _OVERRIDE.fullmatch(argument))}
    kept = [
        text for text in saved if not (match := _OVERRIDE.fullmatch(text)) or match["key"].lstrip("+~") not in given
    ]
    return [*kept, *now]


# ---------------------------------------------------------------------------------------------------------------------
# Help


def help_text() -> str:
    """What `--help` prints: every group with its options, every option with its sentence."""
    lines = [
        "python -m runner [GROUP=OPTION …] [KEY=VALUE …]     train one run",
        "python -m runner -m [GROUP=OPTION,OPTION …]         sweep: one run for each combination",
        "",
        "The config changes how the work is done, never what is computed.",
        "",
    ]
    for group, options in groups().items():
        lines.append(f"{group}=")
        lines += [f"  {option:<14} {description(CONF / group / f'{option}.yaml')}" for option in options]
    lines += ["", "keys:"]
    lines += [
        f"  {line.rstrip()}"
        for line in (CONF / "config.yaml").read_text(encoding="utf-8").splitlines()
        if _is_key(line)
    ]
    lines += [
        "",
        "--cfg job prints the composed config · --info, --multirun, --config-dir and the rest: --hydra-help",
        "python -m runner.tools.doctor shows what this machine has",
    ]
    return "\n".join(lines)


def description(option: Path) -> str:
    """The sentence that stands on the second line of an option file."""
    comments = [line[1:].strip() for line in option.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    sentences = [line for line in comments if not line.startswith(("python -m", "@package"))]
    return sentences[0] if sentences else ""


def _is_key(line: str) -> bool:
    return bool(re.match(r"[a-z_]+: .*#", line))


def _by_number(name: str) -> tuple[int, str]:
    return (int(name), "") if name.isdigit() else (10**9, name)


# ---------------------------------------------------------------------------------------------------------------------
# Errors


def explained(error: Exception) -> str:
    """What Hydra or OmegaConf refused, in this project's words: ten lines at the most."""
    text = str(error)
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, option = error.missing_cfg_file.removesuffix(".yaml").rpartition("/")
        if group in _root_keys():
            return str(ConfigError(group, option, "there is no such option;", _other_option(group, option)))
    if match := re.search(r"[Cc]ould not override '([^']+)'", text):
        return str(ConfigError(match[1], ABSENT, "there is no such key;", _other_key(match[1])))
    if match := re.search(r"Ambiguous value for argument '(.+?)=(.*)'", text):
        key, values = match[1], match[2].replace("'", "")
        a_list = "" if key in groups() else f"; for a list: {key}=[{values}]"
        return str(ConfigError(key, values, "one run takes one value", f"for a sweep, add -m{a_list}"))
    lines = [line for line in text.partition("Config search path")[0].splitlines() if line.strip()]
    if isinstance(error, OverrideParseException):
        why = next((f" ({line})" for line in lines if re.match("no viable|mismatched|extraneous|missing", line)), "")
        pairs = "brackets and quotes come in pairs; a text with blanks or , : = [ ] { } goes as KEY=\"'TEXT'\""
        return str(ConfigError(error.override, ABSENT, f"it cannot be read{why}", pairs))
    if isinstance(error, OmegaConfBaseException) and error.full_key:
        plain = "give it a plain value; ${…} stands for another key's value"
        return str(ConfigError(error.full_key, ABSENT, lines[0], plain))
    return "\n".join(lines[:8])


def _other_option(group: str, option: str) -> str:
    if group == "accumulation" and option.isdigit():
        return f"any other number: accumulation.steps={option}"
    return did_you_mean(option, groups().get(group, []))


def _other_key(key: str) -> str:
    """What `key`, which the chosen option does not have, could have meant."""
    group, _, name = key.partition(".")
    keys = {option: _keys(CONF / group / f"{option}.yaml") for option in groups().get(group, [])}
    if group == "hydra":
        return "python -m runner --cfg hydra shows what there is"
    if not name or not keys:
        return did_you_mean(group, _root_keys())
    if having := [f"{group}={option}" for option, names in keys.items() if name in names]:
        return f"it is a key of {', '.join(having)}; another {group} is chosen"
    return did_you_mean(name, {name for names in keys.values() for name in names}, f"{group}.")


@cache
def _root_keys() -> set[str]:
    return {*_chosen(), *_keys(CONF / "config.yaml")}


@cache
def _chosen() -> set[str]:
    """The groups of the root's table of contents, also those that have no option yet."""
    entries = [entry for entry in OmegaConf.load(CONF / "config.yaml").defaults if isinstance(entry, DictConfig)]
    return {str(name) for entry in entries for name in entry if " " not in str(name)}


def _keys(file: Path) -> list[str]:
    return [str(name) for name in OmegaConf.load(file) if name not in ("_target_", "defaults", "hydra")]
