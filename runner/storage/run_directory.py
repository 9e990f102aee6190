"""The run directory, which holds all files of one run, and is locked by the process that runs it."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import secrets
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from runner.config.errors import ConfigError
from runner.config.overrides import LOCATION_KEYS, override_key
from runner.config.references import with_variables
from runner.config.user_code import is_generated
from runner.storage.files import MAX_LEVELS, UnsafeFileError, check_no_link, open_regular, read_regular, sync
from runner.storage.value_checks import COUNT, UnexpectedContentError, check_known, check_like
from runner.system.secrets import MASK, redacted_values

CONFIG, OVERRIDES, ENVIRONMENT, RESULT = "config.yaml", "overrides.yaml", "environment.json", "result.json"
WANDB = "wandb"
"""A directory in which Weights & Biases makes symbolic links. The runner itself neither reads nor writes there."""

MAX_BYTES = 1_000_000
"""Size limit in bytes of each of these small files (config, overrides, environment and result)."""
_RESULT: dict[str, Any] = dict.fromkeys(("metrics", "best", "step_seconds", "notes"), dict)
_RESULT |= {"status": str, "steps": COUNT, "config_hash": str, "error": str, "seconds": float}
_RESULT |= {"samples_per_second": float}
_MAX_NAME = 120
"""Length limit of a job's name in bytes: file systems allow 255, but that is too wide for a terminal."""
_MAX_LABEL = 60
"""Length limit in bytes of the part of a run's name that shows the overrides; it follows the date, time and id."""
_UNNAMED = (*LOCATION_KEYS, "hydra.", "device", "tracking", "profiler", "log_every", "eval_every", "save_every", "keep")
"""Keys, or the beginnings of keys, that say nothing of what a run computes: they are not part of its name."""
_CONSTANT = ("workload", "data", "env", "experiment", "steps", "epochs")

_MAKE_ROOM = "earlier checkpoints are intact: make room on the disk, then resume (keep=1 needs the least room)"


class StorageError(Exception):
    """Raised when a file of a run cannot be written, because the disk is full or fails, or the run has been moved."""

    def __init__(self, path: Path, why: str, remedy: str = _MAKE_ROOM):
        super().__init__(path, why, remedy)
        self.path, self.why, self.remedy = path, why, remedy

    def __str__(self) -> str:
        return f"{self.path} cannot be written: {self.why}\n  {self.remedy}"


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Convert an OSError raised inside the context to a `StorageError` that names `path`."""
    try:
        yield
    except OSError as error:
        raise StorageError(path, error.strerror or str(error)) from error


def unique_name(overrides: Iterable[str] = ()) -> str:
    """Return `<date>_<time>-<id>-<overrides>`, with as many overrides as fit, except secrets and `_UNNAMED`.

    Those that rarely differ between runs, `_CONSTANT`, come last. The names sort by time. They contain no commas, which
    would separate values in `-m model.weights=DIR/…`.
    """
    known = {override_key(text): text for text in _shown(overrides) if "=" in text}
    shown = [key for key, text in known.items() if MASK not in text and not key.startswith(_UNNAMED)]
    shown.sort(key=lambda key: key.startswith(_CONSTANT))
    labels = [_label(known[key]).lstrip("+").replace(",", "_").rstrip("_.-") for key in shown]
    seconds, nanoseconds = divmod(time.time_ns(), 10**9)
    begun = time.strftime("%Y-%m-%d_%H-%M-%S", time.localtime(seconds))
    parts = begun, f"{nanoseconds // 1000:05x}{secrets.token_hex(1)[0]}", _cut(labels, "+", _MAX_LABEL)
    return "-".join(filter(None, parts))


def create(parent: Path, name: str | None = None, overrides: Iterable[str] = (), key: str = "output_root") -> Path:
    """Create a new directory in `parent`, which need not exist, and return the absolute path of the new directory.

    The name is `name`, or `unique_name(overrides)` if that is None.

    Raises:
        ConfigError: with the key `key`, if the directory cannot be created, for example because `name` exists.
    """
    overrides, directory, why = list(overrides), parent, ""
    try:
        str(parent.absolute()).encode()
    except UnicodeEncodeError:  # torch and safetensors could not open files there
        raise ConfigError(key, str(parent), "its path is not UTF-8", "choose another with output_root=DIR") from None
    for _ in range(10):
        directory = parent / (name or unique_name(overrides))
        existing = nearest_existing(directory)
        try:
            directory.mkdir(parents=True)
            for folder in directory.absolute().parents:  # a power loss could remove the new ones
                with suppress(PermissionError):  # a directory that may be written to, but not read
                    sync(folder)
                if folder == existing:
                    return directory.resolve()
        except OSError as error:
            why = str(error.strerror)
            if not isinstance(error, FileExistsError | FileNotFoundError):
                remove_empty(nearest_existing(directory), existing)
                break  # otherwise, it exists, or another process has removed an empty parent: try another name
    got, remedy = parent, "choose another with output_root=DIR"
    if key != "output_root":
        got, remedy = directory, "name another one; resume=auto continues the run in it"
    raise ConfigError(key, str(got), f"a run directory cannot be created there ({why})", remedy)


def nearest_existing(path: Path) -> Path:
    """Return `path` if it exists, else its nearest parent that exists.

    What this process may not look up is treated as missing: creating something there will raise a clear error.
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
    """Return the name of a job's directory, `<number>-<overrides>`, without secrets: of the keys `swept`, if any."""
    shown = [text for text in overrides if override_key(text) in swept]
    shown = shown or [text for text in overrides if not is_generated(text)]
    first, *others = map(_label, _shown(shown) or ["defaults"])
    return _cut([f"{number:03d}-{first}", *others], ",", _MAX_NAME).rstrip(".-")


def _shown(overrides: Iterable[str]) -> list[str]:
    return redacted_values([with_variables(text) for text in overrides])


def _label(override: str) -> str:
    return re.sub(r"[^\w.=,+-]", "_", override.replace("'", "").replace('"', ""))


def _cut(labels: list[str], separator: str, limit_bytes: int) -> str:
    """Join as many of the first labels as fit into `limit_bytes`; if the first one does not fit, cut off its end."""
    labels = labels.copy()
    while len(labels) > 1 and len(separator.join(labels).encode()) > limit_bytes:
        labels.pop()
    return separator.join(labels).encode()[:limit_bytes].decode(errors="ignore")


def read_result(directory: Path) -> dict[str, Any]:
    """Return the content of the run's `result.json`, of the right types; empty if it does not exist or is damaged."""
    try:
        result = json.loads(read_regular(directory / RESULT, MAX_BYTES))
        check_known(result, _RESULT, ("status", "steps"), "the result")
        if best := result.get("best"):
            check_known(best, {"metric": str, "step": COUNT}, ("metric", "step"), "the best evaluation")
            if (value := best.get("value")) == value:  # not NaN
                check_like(value, float, "its value")
    except (OSError, ValueError, RecursionError, UnexpectedContentError):
        return {}
    return result


def read_environment(directory: Path) -> dict[str, Any]:
    """Return the content of the run's `environment.json`, which may be anything; empty if it is no JSON object."""
    with suppress(OSError, ValueError, RecursionError):
        found = json.loads(read_regular(directory / ENVIRONMENT, MAX_BYTES))
        return found if isinstance(found, dict) else {}
    return {}


def step_name(step: int) -> str:
    """Return the directory name of the checkpoint that is saved after step `step`."""
    return f"step_{step:08d}"


def step_of(checkpoint: Path) -> int | None:
    """Return the step in the directory name of a checkpoint; None for any other name."""
    digits = checkpoint.name.removeprefix("step_")
    return int(digits) if digits.isdecimal() and checkpoint.name == step_name(int(digits)) else None


def saved_steps(root: Path) -> list[int]:
    """Return the steps of the checkpoints in the directory `root`, including damaged ones, in increasing order.

    Raises:
        UnsafeFileError: if `root` is a link, or anything else that is not a directory.
        OSError: if `root` cannot be read.
    """
    with suppress(NotADirectoryError, ValueError):  # as in `entries`
        check_no_link(root)
    return sorted(step for path in entries(root) if (step := step_of(path)) is not None)


def newest_step(directory: Path) -> int:
    """Return the step of the newest checkpoint of a run, damaged or not; 0 if there is none, or it cannot be read."""
    with suppress(OSError):
        return max(saved_steps(directory / "checkpoints"), default=0)
    return 0


def entries(directory: Path) -> list[Path]:
    """Return the paths of the entries of `directory`, sorted by name; an empty list if there is no such directory.

    Raises:
        OSError: if it cannot be read. `Path.glob` would find no entries instead.
    """
    with suppress(FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a path with a null character
        return sorted(directory.iterdir())
    return []


def readable_entries(parent: Path) -> list[Path]:
    """Return `entries(parent)`, where runs or sweeps are created; raise a ConfigError if it cannot be read."""
    try:
        return entries(parent)
    except OSError as error:
        why = f"its content cannot be listed ({error.strerror})"
        raise ConfigError("output_root", str(parent), why, "choose another with output_root=DIR") from None


def lock(directory: Path) -> IO[str] | None:
    """Lock the run directory until the returned file is closed or this process exits; None if another one holds it.

    Raises:
        OSError: if the lock file cannot be opened or created.
    """
    descriptor = os.open(directory / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    file = os.fdopen(descriptor, "r+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        if isinstance(error, BlockingIOError):
            return None
        raise
    return file


def identity(directory: Path) -> tuple[int, int] | None:
    """Return what distinguishes `directory` from others while one of its files is open; None if it is missing."""
    with suppress(OSError):
        status = os.stat(directory)
        return status.st_dev, status.st_ino
    return None


def check_regular(directory: Path) -> None:
    """Check that everything in a run directory is a regular file or a directory, before a run writes to it.

    With a link, a run could write or rename files outside of the run directory. Files in `checkpoints` may have several
    hard links, because they are replaced, never written again. The content of `wandb` is not checked.

    Raises:
        UnsafeFileError: if it contains a link, a pipe or a device, or is nested so deeply that Python cannot delete it.
        OSError: if a file or directory in it cannot be read.
    """
    remaining: list[tuple[str, ...]] = [()]
    while remaining:
        below = remaining.pop()
        folder = directory.joinpath(*below)
        check_no_link(folder)
        if len(below) > MAX_LEVELS:
            raise UnsafeFileError(errno.EPERM, "its directories are nested too deeply", str(folder))
        for entry in list(os.scandir(folder)):  # a list, so that it is closed
            if entry.is_dir(follow_symlinks=False):
                remaining += [(*below, entry.name)] if below or entry.name != WANDB else []
                continue
            with open_regular(Path(entry.path)) as file:
                if below[:1] != ("checkpoints",) and os.fstat(file.fileno()).st_nlink > 1:
                    raise UnsafeFileError(errno.EPERM, "it has another hard link, which would change too", entry.path)


def free_name(path: Path, suffix: str) -> Path:
    """Return the first path of `PATH.SUFFIX`, `PATH.SUFFIX2`, `PATH.SUFFIX3`, … that does not exist."""
    number, name = 2, path.with_name(f"{path.name}.{suffix}")
    while os.path.lexists(name):
        number, name = number + 1, path.with_name(f"{path.name}.{suffix}{number}")
    return name
