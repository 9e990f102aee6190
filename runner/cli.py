"""The command line before Hydra sees it: what there is to type, and what was typed."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

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


@cache
def root_keys() -> set[str]:
    """The keys of the root, its groups among them."""
    return {*_chosen(), *_keys(CONF / "config.yaml")}


def option_keys(group: str, option: str) -> list[str]:
    """The keys of an option."""
    return _keys(CONF / group / f"{option}.yaml", group)


@cache
def _chosen() -> set[str]:
    """The groups of the root's table of contents, also those that have no option yet."""
    entries = [entry for entry in OmegaConf.load(CONF / "config.yaml").defaults if isinstance(entry, DictConfig)]
    return {str(name) for entry in entries for name in entry if " " not in str(name)}


def _keys(file: Path, group: str = "") -> list[str]:
    content: Any = OmegaConf.load(file)
    content = content.get(group, content)  # a file for the whole config has its group's keys under that name
    return [str(name) for name in content if name not in ("_target_", "defaults", "hydra")]


def _by_number(name: str) -> tuple[int, str]:
    return (int(name), "") if name.isdigit() else (10**9, name)


# ---------------------------------------------------------------------------------------------------------------------
# The command line


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
    known = _OVERRIDE.fullmatch(word) or _DELETION.fullmatch(word)
    examples = ", ".join(f"{word}={option}" for option in groups().get(word, [])) or "seed=1"
    check(bool(known), word, ABSENT, "it is no KEY=VALUE, without spaces around the =", f"as in {examples}")
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
    matches = [match for argument in arguments if (match := _OVERRIDE.fullmatch(argument)) and match["key"] == key]
    return matches[-1]["value"].strip("'\"") if matches else None


def resumed(arguments: Iterable[str]) -> Path | None:
    """The run directory, or the checkpoint in one, that `resume=` names; None where it names none.

    Raises:
        ConfigError: when there is no such directory.
    """
    source = override_value(arguments, "resume")
    if source in (None, "auto", "never"):
        return None
    path = Path(source).expanduser()
    others = "auto, never, or a run directory, or a checkpoint in one"
    check(source != "" and path.is_dir(), "resume", source, "there is no such directory", others)
    return path


def with_saved(saved: list[str], now: list[str]) -> list[str]:
    """The overrides of a resumed run: those it was started with, less those that are given anew.

    Another option of a group brings its own keys: those that were typed for the one before go with it.
    """
    given = {_key(text) for text in now}
    replaced = {_key(text) for text in now if text not in saved} & _chosen()
    return [*(t for t in saved if _key(t) not in given and _key(t).partition(".")[0] not in replaced), *now]


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+~")


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
    root = (CONF / "config.yaml").read_text(encoding="utf-8").splitlines()
    lines += [f"  {line.rstrip()}" for line in root if re.match(r"[a-z_]+: .*#", line)]
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
