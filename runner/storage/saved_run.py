"""The config and the overrides of a run as YAML files, which may come from an untrusted source: only plain values."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterator
from contextlib import suppress
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from runner.config import user_code
from runner.config.errors import ABSENT, ConfigError
from runner.config.yaml_file import plain_values, yaml_text
from runner.storage.files import check_no_link, read_regular
from runner.storage.run_directory import CONFIG, MAX_BYTES, OVERRIDES, read_environment, saved_steps, step_name
from runner.system.secrets import printable, redacted_values

log = logging.getLogger(__name__)

_SEAL = b"# sha256 of the lines above: "


class UnreadableConfigError(ConfigError):
    """Raised when a saved config is damaged, or contains anything other than plain values."""


class SavedConfig(NamedTuple):
    """The plain values of a config, and the file from which they were read; `unreadable` says why others were not."""

    values: dict[str, Any]
    file: Path
    unreadable: list[str]


def config_yaml(config: dict[str, Any]) -> str:
    """Return `config` as YAML, without credentials, for people to read."""
    return yaml_text(redacted_values(config))


def config_text(config: dict[str, Any]) -> str:
    """Return `config` as YAML, without credentials. The last line is a comment with the SHA-256 of the lines above."""
    text = config_yaml(config)
    return f"{text}{_SEAL.decode()}{hashlib.sha256(text.encode()).hexdigest()}\n"


def config_files(directory: Path, config: dict[str, Any], overrides: list[str]) -> dict[Path, bytes]:
    """Return the contents of the overrides and the config; the config is the last, as it marks a run directory."""
    typed = yaml_text(overrides)
    return {directory / OVERRIDES: typed.encode(), directory / CONFIG: config_text(config).encode()}


def parse_config(content: bytes, is_read_only: bool = False) -> dict[str, Any]:
    """Return the plain values of a config that was written by `config_text`, with references (`${…}`) as texts.

    Raises:
        UnreadableConfigError: if the SHA-256 does not match, or the config is not a mapping of plain values.
    """
    text, _, sha256 = content.partition(_SEAL)
    if sha256.strip() != hashlib.sha256(text).hexdigest().encode():
        raise _unreadable("its content does not match its SHA-256; options change on the command line")
    return _plain(text, dict) if is_read_only else deepcopy(_plain(text, dict))


def _unreadable(why: str, source: object = ABSENT) -> UnreadableConfigError:
    return UnreadableConfigError("resume", source, why, "name a run directory, or a checkpoint in one")


def _plain(content: bytes, kind: type) -> Any:
    try:
        text = content.decode()
        values = _by_parts(text, kind) or plain_values(text, "file")
    except (UnicodeDecodeError, ConfigError) as error:
        raise _unreadable(getattr(error, "why", str(error))) from None
    if not isinstance(values, kind):
        raise _unreadable(f"it is not a {kind.__name__}")
    return values


_PARTS = {dict: re.compile(r"^(?=[A-Za-z_]\w*:(?: |$))", re.MULTILINE), list: re.compile(r"^(?=- )", re.MULTILINE)}
"""Where the parts of a YAML text begin: the keys of a mapping, or the items of a list."""

_MAX_PART = 10_000


def _by_parts(text: str, kind: type) -> Any:
    """Return the values of a YAML text, which must not be changed; None if it has to be parsed as a whole.

    Configs of many runs have most of their parts in common, which are parsed only once.
    """
    before, *parts = _PARTS[kind].split(text)
    others = re.search(r"^(?:[^\s\w-]|---|\w+$)", text, re.MULTILINE)  # comments, markers, the end of a text over lines
    if before or others or any(len(part) > _MAX_PART for part in parts):
        return None
    try:
        found = [_part(part) for part in parts]
    except ConfigError:  # of the whole, which may be valid, with its own line
        return None
    if kind is list:
        return [item for [item] in found] if all(type(each) is list and len(each) == 1 for each in found) else None
    is_mapping = all(type(each) is dict and len(each) == 1 for each in found)
    values = {key: value for each in found for key, value in each.items()} if is_mapping else {}
    return values if len(values) == len(found) else None


@lru_cache(10_000)
def _part(text: str) -> Any:
    return plain_values(text, "file")


def saved_config(source: Path, is_read_only: bool = False) -> SavedConfig:
    """Return the config of the run or the checkpoint at `source`, from the first intact one of its config files.

    For a run directory, these are its own, then the copies in its checkpoints, from the newest to the oldest; for a
    checkpoint, its copy, then the config of the run directory. If it `is_read_only`, configs may share their values.

    Raises:
        UnreadableConfigError: if no config can be read.
    """
    unreadable = []
    try:
        for file in _config_files(source):
            try:
                check_no_link(file.parent)
                check_no_link(file.parent.parent)
                values = parse_config(read_regular(file, MAX_BYTES), is_read_only)
                return SavedConfig(values, file, unreadable)
            except (OSError, ValueError, UnreadableConfigError) as error:  # ValueError: a path with a null character
                reason = getattr(error, "strerror", None) or getattr(error, "why", error)
                unreadable.append(printable(f"{file.relative_to(directory_of(source))}: {reason}"))
    except ConfigError as error:
        unreadable.append(f"checkpoints: {error.why}")
    raise _unreadable(f"there is no run whose config can be read ({'; '.join(unreadable[:3])})", str(source))


def is_of_a_run(path: Path) -> bool:
    """Return whether a config file in the directory `path` or its checkpoints was written by a run, damaged or not."""
    with suppress(ConfigError):
        for file in _config_files(path):
            with suppress(OSError):
                if _SEAL in read_regular(file, MAX_BYTES):
                    return True
    return False


def _config_files(source: Path) -> Iterator[Path]:
    path = directory_of(source)
    yield source / CONFIG
    others = [path] if path != source else reversed(checkpoints(path))
    yield from (folder / CONFIG for folder in others)


def saved_overrides(path: Path) -> list[str]:
    """Return the overrides with which the run at `path` was started, for display; empty if they cannot be read."""
    with suppress(OSError, UnreadableConfigError):
        return [str(text) for text in _plain(read_regular(path / OVERRIDES, MAX_BYTES), list)]
    return []


def directory_of(source: Path) -> Path:
    """Return the run directory of `source`, which is either a run directory or the path of a checkpoint in one."""
    return source.parent.parent if source.parent.name == "checkpoints" else source


def named_checkpoint(source: str) -> Path | None:
    """Return the checkpoint that the option `resume` names; None if it is a run directory, `auto` or `never`."""
    return Path(source).resolve() if Path(source).parent.name == "checkpoints" else None


def checkpoints(path: Path) -> list[Path]:
    """Return the paths of all checkpoints of the run directory `path`, damaged or not, in the order of their steps.

    Raises:
        ConfigError: with the key `resume`, if the directory of the checkpoints is a link, or cannot be read.
    """
    root = path / "checkpoints"
    try:
        return [root / step_name(step) for step in saved_steps(root)]
    except OSError as error:
        why, remedy = f"it cannot be read ({error.strerror})", "make it readable, or name another run"
        raise ConfigError("resume", str(root), why, remedy) from None


def warn_of_changed_code(directory: Path) -> dict[str, str]:
    """Return the hashes of the code that is given; log which has changed since the last session of the run."""
    now, then = user_code.given().hashes(), read_environment(directory).get("code")
    known = then.items() if isinstance(then, dict) else ()
    for name, sha256 in now.items():
        before = [each for path, each in known if Path(path).name == Path(name).name]  # the folder here may be another
        if before and sha256 not in before:
            log.warning("%s has changed since the last session of this run", name)
    return now
