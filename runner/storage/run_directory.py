"""The run directory, which holds all files of one run, and is locked by the process that runs it."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import secrets
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from omegaconf import OmegaConf

from runner.config.errors import ConfigError
from runner.config.overrides import override_key
from runner.storage.durable_write import sync, write_text
from runner.storage.regular_file import MOST_LEVELS, UnsafeFileError, check_no_link, open_regular, read_regular
from runner.storage.saved_config import config_text
from runner.system.secrets import MASK, redacted_values

CONFIG, OVERRIDES, ENVIRONMENT, RESULT = "config.yaml", "overrides.yaml", "environment.json", "result.json"
WANDB = "wandb"
"""A directory in which Weights & Biases makes symbolic links. The runner itself neither reads nor writes there."""

LIMIT_BYTES = 1_000_000
"""Size limit in bytes of each of these small files (config, overrides, environment and result)."""
_DEFAULTS: dict[str, Any] = {"metrics": {}, "best": {}, "step_seconds": {}, "notes": {}, "config_hash": "", "error": ""}
"""The default values of some keys of a result. They also define the types of the values."""
_LONGEST = 120
"""Length limit of a job's name in bytes: file systems allow 255, but that is too wide for a terminal."""
_LONGEST_LABEL = 60
"""Length limit in bytes of the part of a run's name that shows the overrides; it follows the date, time and id."""
_UNNAMED = ("name", "output_root", "resume", "hydra.")
"""Prefixes of the keys that are left out of a run's name, because they do not affect what the run computes."""


class StorageError(Exception):
    """Raised when a file of a run cannot be written, because the disk is full or fails."""

    def __init__(self, path: Path, why: str):
        super().__init__(path, why)
        self.path, self.why = path, why

    def __str__(self) -> str:
        return (
            f"{self.path} cannot be written: {self.why}\n"
            "  earlier checkpoints are intact: make room on the disk, then resume (keep=1 needs the least room)"
        )


class MovedError(StorageError):
    """Raised when the run directory has been removed or renamed, or another one has taken its place."""

    def __init__(self, path: Path):
        super().__init__(path, "it is not there any more")

    def __str__(self) -> str:
        return (
            f"{self.path} has been removed or renamed while the run was running\n"
            "  if it is elsewhere now, resume it there, from its last checkpoint"
        )


def unique_name(overrides: Iterable[str] = ()) -> str:
    """Return `<date>_<time>-<id>-<overrides>`; the random id distinguishes runs that start in the same second.

    The names sort by time. They contain no commas, because a user may type the name of a run in the overrides of a
    sweep, as in `-m model.weights=DIR/…`. A comma would separate two values there.

    Args:
        overrides: the overrides of the run. The name contains as many of them as fit, except overrides with secrets
            and overrides that do not affect what the run computes.
    """
    known = {override_key(text): text for text in redacted_values(list(overrides)) if "=" in text}
    shown = [text for key, text in known.items() if MASK not in text and not key.startswith(_UNNAMED)]
    labels = [_label(text).lstrip("+").replace(",", "_").rstrip("_.-") for text in shown]
    cut = _cut(labels, "+", _LONGEST_LABEL)
    if len(cut) < len(labels[0] if labels else ""):  # in the middle of a word
        cut = re.sub(r"(?<==)(.+)[\W_][^\W_]*", r"\1", cut).rstrip("_.-")
    return "-".join(filter(None, (time.strftime("%Y-%m-%d_%H-%M-%S"), secrets.token_hex(3), cut)))


def create(parent: Path, name: str | None = None, overrides: Iterable[str] = ()) -> Path:
    """Create a new directory in `parent`, and return the absolute path of the new directory.

    Args:
        parent: a directory, which is created if it does not exist.
        name: the name of the new directory; None for `unique_name(overrides)`.
        overrides: the overrides of the run, as in `unique_name`.

    Raises:
        ConfigError: if the new directory cannot be created, for example because `name` exists, or the disk is full.
    """
    why, overrides = None, list(overrides)
    for _ in range(10):
        directory = parent / (name or unique_name(overrides))
        try:
            _make(directory)
            return directory.resolve()
        except (FileExistsError, FileNotFoundError) as error:  # it exists, or another process removed an empty parent
            why = error.strerror
        except OSError as error:
            why = error.strerror
            break
    why = f"a run directory cannot be created there ({why})"
    raise ConfigError("output_root", str(parent), why, "choose another with output_root=DIR")


def _make(directory: Path) -> None:
    """Create `directory` and its missing parents, and flush the entries of all these directories to disk.

    Without the flush, a power loss could remove a directory, even if the files in it have been flushed to disk.

    Raises:
        OSError: if `directory` cannot be created, or already exists.
    """
    existing = nearest_existing(directory)
    try:
        directory.mkdir(parents=True)
        for folder in directory.absolute().parents:
            with suppress(PermissionError):  # a directory that may be written to, but not read
                sync(folder)
            if folder == existing:
                break
    except FileExistsError:  # it may be that of another process, and still be empty
        raise
    except OSError:
        remove_empty(nearest_existing(directory), existing)
        raise


def nearest_existing(path: Path) -> Path:
    """Return `path` if it exists, else its nearest parent that exists.

    If this process lacks the permission to search a directory, the paths in this directory are treated as missing. No
    error is raised here: the attempt to create something in the directory will raise a clear error.
    """
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if os.path.exists(folder))


def remove_empty(path: Path, end: Path) -> None:
    """Remove the directory `path`, and then its parents below `end`; stop at the first directory that is not empty."""
    with suppress(OSError):  # not empty: another run uses it
        for folder in (path.absolute(), *path.absolute().parents):
            if folder == end:
                return
            folder.rmdir()


def job_name(number: int, overrides: list[str], swept: Collection[str] = ()) -> str:
    """Return the directory name of a job of a sweep, `<job>-<overrides>`, without secrets.

    Args:
        number: the number of the job.
        overrides: the overrides of the job.
        swept: the keys whose values differ between the jobs. These keys come first in the name, because the end of a
            long name is cut off.
    """
    ordered = sorted(redacted_values(overrides), key=lambda text: override_key(text) not in swept)
    first, *others = (_label(text) for text in ordered) if ordered else ("",)
    return _cut([f"{number:03d}-{first}", *others], ",", _LONGEST).rstrip(".-")


def _label(override: str) -> str:
    """Return an override in which characters that are special in a file system or shell are removed or replaced."""
    return re.sub(r"[^\w.=,+-]", "_", override.replace("'", "").replace('"', ""))


def _cut(labels: list[str], separator: str, limit_bytes: int) -> str:
    """Join as many of the first labels as fit into `limit_bytes`; if the first one does not fit, cut off its end."""
    labels = labels.copy()
    while len(labels) > 1 and len(separator.join(labels).encode()) > limit_bytes:
        labels.pop()
    return separator.join(labels).encode()[:limit_bytes].decode(errors="ignore")


def write_config(directory: Path, config: dict[str, Any], overrides: list[str]) -> None:
    """Write the config, and the overrides that the user typed, to files in the run directory `directory`.

    Raises:
        OSError: if a file cannot be written; the overrides may then have been written without the config.
    """
    write_text(directory / OVERRIDES, OmegaConf.to_yaml(OmegaConf.create(overrides)))
    write_text(directory / CONFIG, config_text(config))  # last, because it marks a run directory


def read_result(directory: Path) -> dict[str, Any]:
    """Return the content of the run's `result.json`; an empty dict if there is no such file or it is damaged."""
    try:
        result = json.loads(read_regular(directory / RESULT, LIMIT_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return result if _is_result(result) else {}


def _is_result(result: Any) -> bool:
    """Return whether all values in `result` have the right types, so that the result can be shown."""
    if not isinstance(result, dict) or not isinstance(result.get("status"), str) or not is_step(result.get("steps")):
        return False
    best = result.get("best", {})
    typed = all(isinstance(result.get(key, default), type(default)) for key, default in _DEFAULTS.items())
    numbers = all(_is_number(result.get(key, 0)) for key in ("seconds", "samples_per_second"))
    is_best = (
        typed and isinstance(best.get("metric"), str) and _is_number(best.get("value")) and is_step(best.get("step"))
    )
    return typed and numbers and (not best or is_best)


def _is_number(value: object) -> bool:
    """Return whether `value` is a float, or an integer that can be converted to one."""
    return isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**1023)


def is_step(value: object) -> bool:
    """Return whether `value` is a possible number of steps."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**15


def step_name(step: int) -> str:
    """Return the directory name of the checkpoint that is saved after step `step`."""
    return f"step_{step:08d}"


def step_of(checkpoint: Path) -> int | None:
    """Return the step in the directory name of a checkpoint; None for any other name."""
    digits = checkpoint.name.removeprefix("step_")
    return int(digits) if digits.isdecimal() and checkpoint.name == step_name(int(digits)) else None


def newest_step(directory: Path) -> int:
    """Return the step of the newest checkpoint of the run at `directory`, damaged or not.

    The result is 0 if there is no checkpoint, or the directory of the checkpoints cannot be read.
    """
    try:
        paths = entries(directory / "checkpoints")
    except OSError:
        return 0
    return max((step_of(path) or 0 for path in paths), default=0)


def entries(directory: Path) -> list[Path]:
    """Return the paths of the entries of `directory`, sorted by name; an empty list if there is no such directory.

    Raises:
        OSError: if the directory cannot be read. `Path.glob` would find no entries instead.
    """
    try:
        return sorted(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a path with a null character
        return []


def readable_entries(parent: Path) -> list[Path]:
    """Return the paths of all entries of `parent`, sorted by name; an empty list if `parent` does not exist.

    Args:
        parent: a directory in which runs or sweeps are created.

    Raises:
        ConfigError: with the key `output_root`, if the directory cannot be read.
    """
    try:
        return entries(parent)
    except OSError as error:
        why = f"its content cannot be listed ({error.strerror})"
        raise ConfigError("output_root", str(parent), why, "choose another with output_root=DIR") from None


def lock(directory: Path) -> IO[str] | None:
    """Lock the run directory for this process, until the returned file is closed or the process exits.

    Returns:
        The open lock file; None if another process holds the lock.

    Raises:
        OSError: if the lock file cannot be opened or created.
    """
    path = directory / ".lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    file = os.fdopen(descriptor, "r+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    except BaseException:
        file.close()
        raise
    return file


def identity(directory: Path) -> tuple[int, int] | None:
    """Return what distinguishes `directory` from others while one of its files is open; None if there is none."""
    try:
        status = os.stat(directory)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def check_regular(
    directory: Path, most_levels: int = MOST_LEVELS, skipped: tuple[str, ...] = (WANDB,), hard_links: bool = False
) -> None:
    """Check that everything in a run directory is a regular file or a directory, before a run writes to it.

    With a link, a run could write or rename files outside of the run directory. Files in `checkpoints` may have several
    hard links, because they are replaced, never written again.

    Args:
        directory: the run directory.
        most_levels: maximum depth of nested directories. A limit is needed, because Python cannot delete a thousand
            nested directories.
        skipped: names of subdirectories of the run directory whose content is not checked.
        hard_links: whether files may have several hard links.

    Raises:
        UnsafeFileError: if the directory contains a link, a pipe or a device, or is nested too deeply.
        OSError: if a file or directory in it cannot be read.
    """
    check_no_link(directory)
    if most_levels < 0:
        raise UnsafeFileError(errno.EPERM, "its directories are nested too deeply", str(directory))
    for path in directory.iterdir():
        if not path.is_dir() or path.is_symlink():
            with open_regular(path) as file:
                if not hard_links and os.fstat(file.fileno()).st_nlink > 1:
                    raise UnsafeFileError(errno.EPERM, "it has another hard link, which would change too", str(path))
        elif path.name not in skipped:
            check_regular(path, most_levels - 1, (), hard_links or path.name == "checkpoints")


def free_name(path: Path, suffix: str) -> Path:
    """Return the first path of `PATH.SUFFIX`, `PATH.SUFFIX2`, `PATH.SUFFIX3`, … that does not exist."""
    number, name = 2, path.with_name(f"{path.name}.{suffix}")
    while os.path.lexists(name):
        number, name = number + 1, path.with_name(f"{path.name}.{suffix}{number}")
    return name
