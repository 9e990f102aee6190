"""Functions that remove runs and sweeps.

A run directory is renamed before its files are removed. If the removal is interrupted, the new name shows that the
directory contains only the remains of a run.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import IO

from runner.analysis.run_states import is_locked
from runner.analysis.runs_list import is_run
from runner.analysis.saved_runs import REMOVED
from runner.storage import run_directory
from runner.storage.durable_write import sync
from runner.storage.regular_file import MOST_LEVELS, walk
from runner.storage.run_directory import CONFIG
from runner.sweep.engines import slurm
from runner.sweep.ledger import CONSOLE, OPTIONS, STUDY
from runner.sweep.ledger_reader import LEDGER

_SWEEP_FILES = (
    *(LEDGER, ".lock", STUDY, f"{CONSOLE}/*.txt", f"{OPTIONS}/experiment/best.yaml", f"{slurm.FOLDER}/*"),
    *(f".{LEDGER}.part", f"{OPTIONS}/experiment/.best.yaml.part", "events.out.tfevents.*"),
)
"""Patterns of the paths that a sweep writes below its directory, besides the directories of its runs.

A `*.part` file is incomplete: the sweep was killed while it wrote the file, or the disk was full.
"""


class KeptError(Exception):
    """Raised when a run or a sweep is not removed; the message says why."""


def remove_run(path: Path, end: Path) -> None:
    """Remove the run directory `path`, and then its parent directories below `end` that have become empty.

    The directory is renamed first. If the removal is interrupted, the new name shows that these are the remains of a
    run. If the run was the only one left in its sweep, the files of the sweep are removed as well, unless the sweep's
    directory also contains files that the sweep has not written.

    Args:
        path: a run directory.
        end: a parent directory of the run that is kept even if it becomes empty.

    Raises:
        KeptError: if the run or its sweep is running, or `path` is not a run directory.
        OSError: if the directory cannot be removed completely; it may then be renamed and have lost some of its files.
    """
    with ExitStack() as locks:
        if os.path.lexists(path.parent / LEDGER):
            locks.enter_context(_locked(path.parent, "its sweep is running"))
        _remove(path)
        if os.path.lexists(path.parent / LEDGER):
            _remove_sweep_files(path.parent)
    run_directory.remove_empty(path.parent, end)


def remove_sweep(path: Path, end: Path) -> None:
    """Remove the sweep at `path` with all its runs, and then its parent directories below `end` that have become empty.

    The ledger is removed first, so that it never lists runs that no longer exist. Then the runs are removed. Finally,
    the other files of the sweep are removed, unless the directory also contains files that the sweep has not written.

    Args:
        path: the directory of the sweep.
        end: a parent directory of the sweep that is kept even if it becomes empty.

    Raises:
        KeptError: if the sweep or one of its runs is running.
        OSError: if something cannot be removed; a part of the sweep may then have been removed.
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
    """Hold the lock of a run directory or a sweep inside the context.

    Raises:
        KeptError: if another process holds the lock. The message of the error is `why`.
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
        while entries := sorted(entry for entry in aside.iterdir() if entry.name != CONFIG):
            for entry in entries:
                if entry.is_dir() and not entry.is_symlink():
                    _move_deepest(entry, aside)
                    shutil.rmtree(entry)  # it follows no links
                else:
                    entry.unlink()
        (aside / CONFIG).unlink()  # last, because it shows that these are the remains of a run
        aside.rmdir()


def _move_deepest(top: Path, to: Path) -> None:
    """Move the directories that are more than `MOST_LEVELS` levels below `top` into the directory `to`.

    This is necessary because `shutil.rmtree` is recursive, and fails on a thousand nested directories.
    """
    levels = os.path.join(top, "").count(os.sep)
    for folder, folders, _ in os.walk(top):
        if folder.count(os.sep) >= levels + MOST_LEVELS - 1:
            for name in folders:
                os.rename(os.path.join(folder, name), to / secrets.token_hex(8))
            folders.clear()


def _remove_sweep_files(path: Path) -> None:
    """Remove what a sweep has written to its directory. If the directory contains any other files, remove nothing."""
    folders = list(walk(path))
    links = [Path(top, name) for top, names, _ in folders for name in names if os.path.islink(Path(top, name))]
    files = [Path(top, name) for top, _, names in folders for name in names]
    if all(_is_of_sweep(file.relative_to(path)) for file in (*links, *files)):
        for file in (*links, *files):
            file.unlink()
        for top, _, _ in reversed(folders[1:]):
            os.rmdir(top)


def _is_of_sweep(file: Path) -> bool:
    return any(fnmatch(file.as_posix(), pattern) for pattern in _SWEEP_FILES)
