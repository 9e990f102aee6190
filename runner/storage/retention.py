"""Deletes checkpoints of a run: usually all except the newest ones and the best one."""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from runner.storage.index_json import INDEX
from runner.storage.regular_file import check_no_link
from runner.storage.run_directory import free_name, step_name, step_of

log = logging.getLogger(__name__)

_LEFTOVER = re.compile(r"tmp\.step_[0-9]{8,}|step_[0-9]{8,}\.pruned[0-9]*")
"""The names of checkpoints whose saving or deletion was interrupted."""


def delete_outdated(root: Path, keep: int, best_step: int | None) -> None:
    """Delete all checkpoints except the newest ones and the best one; if this fails, log a warning.

    Args:
        root: the directory of the checkpoints.
        keep: the number of newest checkpoints to keep. 0 is treated as 1 here; when a run with `keep=0` is done,
            `delete_all` is called.
        best_step: the step of the best checkpoint; None if there is none.
    """
    try:
        delete(root, [step for step in saved_steps(root)[: -max(1, keep)] if step != best_step])
    except OSError as error:  # the new checkpoint is complete: go on, and try again after the next one
        log.warning("old checkpoints cannot be deleted: %s", error)


def delete_all(directory: Path) -> None:
    """Delete all checkpoints in the run directory `directory`; if this fails, log a warning."""
    root = directory / "checkpoints"
    try:
        steps = saved_steps(root)
        if root.is_dir():
            (root / INDEX).unlink(missing_ok=True)
        delete(root, steps)
    except OSError as error:
        log.warning("checkpoints cannot be deleted: %s", error)


def saved_steps(root: Path) -> list[int]:
    """Return the steps of the checkpoints in the directory `root`, in increasing order.

    Raises:
        UnsafeFileError: if `root` is a link, or anything else that is not a directory.
    """
    check_no_link(root)
    if not root.is_dir():
        return []
    return sorted(step for path in root.iterdir() if (step := step_of(path)) is not None)


def delete(root: Path, steps: Iterable[int]) -> None:
    """Delete the checkpoints of `steps` in the directory `root`, and the leftovers of interrupted saves and deletions.

    Raises:
        OSError: if a checkpoint or a leftover cannot be deleted. Others may already have been deleted.
    """
    for step in steps:  # renamed first, so that an interrupted deletion leaves no partial checkpoint
        path = root / step_name(step)
        os.replace(path, free_name(path, "pruned"))
    for path in root.iterdir():
        if _LEFTOVER.fullmatch(path.name):
            path.unlink() if path.is_symlink() else shutil.rmtree(path)
