"""Removes run directories so that, whenever the command is killed, no half of a run looks like a whole one."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from runner.storage import run_directory
from runner.storage.durable_write import sync
from runner.storage.run_directory import CONFIG
from runner.sweep.ledger import CONSOLE
from runner.sweep.ledger_file import LEDGER
from runner.tools.run_states import is_locked
from runner.tools.runs_list import is_run
from runner.tools.saved_runs import REMOVED


class KeptError(Exception):
    """Raised when a run or a sweep is not removed; the message says why."""


def remove_run(path: Path, end: Path) -> None:
    """Remove the run directory `path`, and then its parents below `end` that are empty.

    First, the directory is renamed to a name that no tool takes for a run. A sweep whose last run has been removed is
    removed as well, if nothing but the files of the sweep is in its directory.

    Args:
        path: a run directory.
        end: the directory that is kept even if it is empty.

    Raises:
        KeptError: if the run or its sweep is running, or `path` is not a run directory.
        OSError: if the directory cannot be removed.
    """
    with ExitStack() as locks:
        if os.path.lexists(path.parent / LEDGER):
            locks.enter_context(_locked(path.parent, "its sweep is running"))
        _remove(path)
        if os.path.lexists(path.parent / LEDGER):
            _remove_sweep_files(path.parent)
    run_directory.remove_empty(path.parent, end)


def remove_sweep(path: Path, end: Path) -> None:
    """Remove all runs of the sweep at `path`, its ledger, and its empty parents below `end`.

    The ledger is removed first, because it would list runs that no longer exist. What is neither a run nor a file of
    the sweep stays.

    Args:
        path: the directory of the sweep.
        end: the directory that is kept even if it is empty.

    Raises:
        KeptError: if the sweep or one of its runs is running.
        OSError: if something cannot be removed.
    """
    with _locked(path, "it is running"):
        runs = [child for child in sorted(path.iterdir()) if is_run(child)]
        if running := next((run for run in runs if is_locked(run)), None):
            raise KeptError(f"its run {running.name} is running")
        (path / LEDGER).unlink()
        sync(path)
        for run in runs:
            _remove(run)
        _remove_sweep_files(path)
    run_directory.remove_empty(path, end)


@contextmanager
def _locked(directory: Path, why: str) -> Iterator[IO[str]]:
    """Lock a run directory or a sweep.

    Raises:
        KeptError: with the message `why` if another process holds the lock.
    """
    lock = run_directory.lock(directory)
    if lock is None:
        raise KeptError(why)
    with lock:
        yield lock


def _remove(path: Path) -> None:
    if not is_run(path):
        raise KeptError("it is not a run directory")
    with _locked(path, "it is running"):
        aside = path
        if not path.name.startswith(REMOVED):
            aside = path.with_name(f"{REMOVED}{secrets.token_hex(4)}")
            os.rename(path, aside)
            sync(aside.parent)  # before anything in it is removed: a power loss must not undo the renaming
        for entry in sorted(aside.iterdir()):
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)  # it follows no links
            elif entry.name != CONFIG:
                entry.unlink()
        (aside / CONFIG).unlink()  # last, because it shows that these are the remains of a run
        aside.rmdir()


def _remove_sweep_files(path: Path) -> None:
    """Remove the files that a sweep itself writes to its directory, unless anything else is there."""
    if {entry.name for entry in path.iterdir()} <= {LEDGER, ".lock", CONSOLE}:
        if (path / CONSOLE).is_dir() and not (path / CONSOLE).is_symlink():
            for file in (path / CONSOLE).glob("*.txt"):
                file.unlink()
            run_directory.remove_empty(path / CONSOLE, path)
        for name in (LEDGER, ".lock"):
            (path / name).unlink(missing_ok=True)
