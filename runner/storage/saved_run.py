"""Reading of the config and the overrides in a run directory, which may come from an untrusted source."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from runner.config.errors import ConfigError
from runner.storage.files import check_no_link, read_regular
from runner.storage.run_directory import CONFIG, MAX_BYTES, OVERRIDES, entries, step_of
from runner.storage.saved_config import UnreadableConfigError, is_sealed, parse_config, parse_list


class SavedConfig(NamedTuple):
    """The plain values of a config, and the file from which they were read; `unreadable` says why others were not."""

    values: dict[str, Any]
    file: Path
    unreadable: list[str]


def directory_of(source: Path) -> Path:
    """Return the run directory of `source`, which is either a run directory or the path of a checkpoint in one."""
    return source.parent.parent if source.parent.name == "checkpoints" else source


def named_checkpoint(source: str) -> Path | None:
    """Return the checkpoint that the option `resume` names; None if it is a run directory, `auto` or `never`."""
    return Path(source).resolve() if Path(source).parent.name == "checkpoints" else None


def saved_config(source: Path) -> SavedConfig:
    """Return the config of the run or the checkpoint at `source`, from the first intact one of its config files.

    For a run directory, these are its own, then the copies in its checkpoints, from the newest to the oldest; for a
    checkpoint, its copy, then the config of the run directory.

    Raises:
        UnreadableConfigError: if no config can be read.
    """
    files, unlisted = _config_files(source)
    unreadable = []
    for file in files:
        try:
            check_no_link(file.parent)
            check_no_link(file.parent.parent)
            return SavedConfig(parse_config(read_regular(file, MAX_BYTES)), file, unreadable)
        except (OSError, ValueError, UnreadableConfigError) as error:  # ValueError: a path with a null character
            reason = error.strerror if isinstance(error, OSError) else error
            unreadable.append(f"{file.relative_to(directory_of(source))}: {reason}")
    raise UnreadableConfigError("; ".join([*unreadable, *unlisted][:3]))


def is_of_a_run(path: Path) -> bool:
    """Return whether a config file in the directory `path` or its checkpoints was written by a run, damaged or not."""
    for file in _config_files(path)[0]:
        with suppress(OSError):
            if is_sealed(read_regular(file, MAX_BYTES)):
                return True
    return False


def _config_files(source: Path) -> tuple[list[Path], list[str]]:
    """Return the config files in the order in which to try them, and why those of the checkpoints cannot be listed."""
    path = directory_of(source)
    if path != source:
        return [source / CONFIG, path / CONFIG], []
    try:
        return [path / CONFIG, *(checkpoint / CONFIG for checkpoint in reversed(checkpoints(path)))], []
    except ConfigError as error:
        return [path / CONFIG], [f"checkpoints: {error.why}"]


def checkpoints(path: Path) -> list[Path]:
    """Return the paths of all checkpoints of the run directory `path`, damaged or not, in the order of their steps.

    Raises:
        ConfigError: with the key `checkpoint`, if the directory of the checkpoints cannot be read.
    """
    try:
        found = [each for each in entries(path / "checkpoints") if step_of(each) is not None]
    except OSError as error:
        why, remedy = f"it cannot be read ({error.strerror})", "make it readable, or name another run"
        raise ConfigError("checkpoint", str(path / "checkpoints"), why, remedy) from None
    return sorted(found, key=lambda each: step_of(each) or 0)  # the names of steps have eight digits or more


def saved_overrides(path: Path) -> list[str]:
    """Return the overrides with which the run at `path` was started, for display; empty if they cannot be read."""
    try:
        overrides = parse_list(read_regular(path / OVERRIDES, MAX_BYTES))
    except (OSError, UnreadableConfigError):
        return []
    return [str(text) for text in overrides]
