"""Finds the checkpoint of a run that the user chose with `best`, `last` or a step, without changing any files.

`checkpoints/index.json` is not read, because the checkpoints contain the same information, and their hashes are
verified.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from runner.config.errors import ConfigError, check
from runner.storage.checkpoint import load
from runner.storage.content_checks import UnexpectedContentError, check_count, check_like
from runner.storage.manifest import DamagedError, verified_manifest
from runner.storage.regular_file import UnsafeFileError, check_no_link
from runner.storage.run_directory import step_name
from runner.storage.saved_run import checkpoints

log = logging.getLogger(__name__)

_ANOTHER = "name another checkpoint of the run"
_SAVE_ONE = "let the run save one (keep=1 or more), or name another run"


def chosen_checkpoint(run: Path, choice: str | int) -> Path:
    """Return the path of a checkpoint of the run in the directory `run`.

    Args:
        run: the run directory.
        choice: `last` for the newest intact checkpoint, `best` for the checkpoint with the best evaluation, or the step
            at which a checkpoint was saved.

    Raises:
        ConfigError: with the key `checkpoint`, if there is no such checkpoint or it cannot be read, or as in
            `last_checkpoint`.
    """
    if choice == "last":
        return last_checkpoint(run)
    if choice == "best":
        return best_checkpoint(run)
    steps = ", ".join(path.name.removeprefix("step_").lstrip("0") or "0" for path in _checkpoints(run))
    remedy = f"choose best, last, or one of {steps}" if steps else _SAVE_ONE
    is_step = str(choice).isdecimal() and len(str(choice)) < 20
    check(is_step, "checkpoint", choice, "it is not a step", remedy)
    path = run / "checkpoints" / step_name(int(choice))
    with _errors_of(path):
        there = path.is_dir()
    check(there, "checkpoint", choice, f"there is no {path.name}", remedy)
    return path


def last_checkpoint(run: Path) -> Path:
    """Return the path of the newest intact checkpoint of `run`; log a warning for each newer one that is damaged.

    Raises:
        ConfigError: with the key `checkpoint`, if no checkpoint is intact; if the newest intact one cannot be read, or
            was written by an incompatible version of this project or by something else; or if `checkpoints` cannot be
            read or is a link.
    """
    found = _checkpoints(run)
    for path in reversed(found):
        try:
            with _errors_of(path):
                verified_manifest(path)
            return path
        except DamagedError as error:
            log.warning("%s; trying the previous checkpoint", error)
    why = "none of its checkpoints is intact" if found else "it has no checkpoint yet"
    raise ConfigError("checkpoint", str(run), why, _SAVE_ONE)


def _checkpoints(run: Path) -> list[Path]:
    """Return the paths of the checkpoints of `run`, in the order of their steps.

    Raises:
        ConfigError: with the key `checkpoint`, if their directory cannot be read, or is a link, which could lead to the
            checkpoints of another run.
    """
    try:
        check_no_link(run / "checkpoints")
    except UnsafeFileError as error:
        remedy = "name the run directory that has the checkpoints"
        raise ConfigError("checkpoint", str(error.filename), str(error.strerror), remedy) from None
    except OSError as error:
        raise ConfigError("checkpoint", str(run), f"it cannot be read ({error.strerror})", _ANOTHER) from None
    return checkpoints(run)


def best_checkpoint(run: Path) -> Path:
    """Return the path of the checkpoint with the best evaluation, whose step is recorded in the newest checkpoint.

    Raises:
        NoBestError: if the run has not been evaluated, or the checkpoint of that step does not exist.
        ConfigError: with the key `checkpoint`, as in `last_checkpoint`.
    """
    newest = last_checkpoint(run)
    try:
        with _errors_of(newest):
            checkpoint = load(newest)
        best: Any = checkpoint.state.get("best")
        check_like(best, dict, "the best evaluation")
        if best:
            check_count(best.get("step"), "the best evaluation, step", most=checkpoint.step)
    except (DamagedError, UnexpectedContentError) as error:
        raise ConfigError("checkpoint", str(newest), str(error), _ANOTHER) from None
    if not best:
        raise NoBestError(f"{run} has not been evaluated", "take last, the newest one")
    path = newest.with_name(step_name(best["step"]))
    if not path.is_dir():
        raise NoBestError(f"{path} does not exist", "take last, the newest one, or name another")
    return path


class NoBestError(ConfigError):
    """Raised when a run has checkpoints, but not the one with the best evaluation."""

    def __init__(self, why: str, remedy: str):
        super().__init__("checkpoint", "best", why, remedy)


@contextmanager
def _errors_of(checkpoint: Path) -> Iterator[None]:
    """Convert a ConfigError or OSError raised inside the context to a ConfigError with the key `checkpoint`."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError("checkpoint", str(checkpoint), error.why, _ANOTHER) from None
    except OSError as error:
        raise ConfigError("checkpoint", str(checkpoint), str(error), _ANOTHER) from None
