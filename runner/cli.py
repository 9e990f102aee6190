"""The command line before Hydra sees it, and Hydra's errors before the user does."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from hydra.errors import MissingConfigException
from omegaconf import OmegaConf

from runner.config import ABSENT, CONF, ConfigError, did_you_mean

_OVERRIDE = re.compile(r"(?P<key>[~+]{0,2}[\w./@]+)=(?P<value>.*)", re.DOTALL)
_NUMBER = re.compile(r"[+-]?\d[\w.]*")
_PATHS = ("output_root", "resume", "data.root", "model.weights", "name")


def groups() -> dict[str, list[str]]:
    """The config groups and their options."""
    return {
        folder.name: sorted((path.stem for path in folder.glob("*.yaml")), key=_by_number)
        for folder in sorted(CONF.iterdir())
        if folder.is_dir() and any(folder.glob("*.yaml"))
    }


def quoted(argument: str, sweep: bool) -> str:
    """`argument` as Hydra's grammar wants it: `precision=16` names an option, not a number; paths hold any character."""
    match = _OVERRIDE.fullmatch(argument)
    if match is None:
        return argument
    key, value = match["key"], match["value"]
    if key.lstrip("+") in groups():
        return f"{key}={','.join(_quote(part) if _NUMBER.fullmatch(part) else part for part in value.split(','))}"
    foreign = not value.isascii() or (key.lstrip("+") in _PATHS and not re.fullmatch(r"[\w./${}:-]*", value))
    if foreign and value[:1] not in "'\"[{":
        parts = value.split(",") if sweep else [value]
        return f"{key}={','.join(_quote(part) for part in parts)}"
    return argument


def _quote(value: str) -> str:
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'" if value else "''"


def override_value(arguments: Iterable[str], key: str) -> str | None:
    """The value that `arguments` give to `key`, unquoted; None where they do not."""
    found = [match["value"] for argument in arguments if (match := _OVERRIDE.fullmatch(argument)) and match["key"] == key]
    return found[-1].strip("'\"") if found else None


def with_saved(saved: list[str], now: list[str]) -> list[str]:
    """The overrides of a resumed run: those it was started with, less those that are given anew."""
    given = {match["key"].lstrip("+~") for argument in now if (match := _OVERRIDE.fullmatch(argument))}
    kept = [text for text in saved if not (match := _OVERRIDE.fullmatch(text)) or match["key"].lstrip("+~") not in given]
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
    lines += [f"  {line.rstrip()}" for line in (CONF / "config.yaml").read_text(encoding="utf-8").splitlines() if _is_key(line)]
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
        if group in groups():
            return str(ConfigError(group, option, "there is no such option;", _remedy(group, option)))
    if match := re.search(r"[Cc]ould not override '([^']+)'", text):
        key = match[1]
        return str(ConfigError(key, ABSENT, "there is no such key;", did_you_mean(key, known_keys(key))))
    key = getattr(error, "full_key", None) or getattr(error, "override", None)
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith(("full_key", "object_type"))]
    return "\n".join(([f"{key}:"] if key and str(key) not in lines[0] else []) + lines[:6])


def _remedy(group: str, option: str) -> str:
    if group == "accumulation" and option.isdigit():
        return f"any other number: accumulation.steps={option}"
    return did_you_mean(option, groups()[group])


def known_keys(key: str) -> list[str]:
    """The keys that `key` could have meant: those of its group's options, or of the root."""
    group, dot, _ = key.rpartition(".")
    if dot and group in groups():
        files = [CONF / group / f"{option}.yaml" for option in groups()[group]]
        return sorted({f"{group}.{name}" for file in files for name in _names(file)})
    return sorted({*groups(), *_names(CONF / "config.yaml")} - {"hydra", "defaults"})


def _names(file: Path) -> list[str]:
    return [str(name) for name in OmegaConf.load(file) if name not in ("_target_", "defaults", "hydra")]
