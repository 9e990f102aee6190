"""Deletes checkpoints of a run: usually all except the newest ones and the best one."""

from __future__ import annotations

import logging
import os
import re
import shutil
from pathlib import Path

from runner.storage.files import check_no_link
from runner.storage.run_directory import entries, free_name, step_name, step_of

log = logging.getLogger(__name__)

_LEFTOVER = re.compile(r"tmp\.step_[0-9]{8,}|step_[0-9]{8,}\.pruned[0-9]*")
"""The names of checkpoints whose saving or deletion was interrupted."""


def saved_steps(root: Path) -> list[int]:
    """Return the steps of the checkpoints in the directory `root`, including damaged ones, in increasing order.

    Raises:
        UnsafeFileError: if `root` is a link, or anything else that is not a directory.
        OSError: if `root` cannot be read.
    """
    check_no_link(root)
    return sorted(step for path in entries(root) if (step := step_of(path)) is not None)


def prune(root: Path, keep: int | None, best_step: int | None = None) -> None:
    """Delete old checkpoints, and what interrupted saves and deletions have left; if this fails, log a warning.

    Args:
        root: the directory of the checkpoints.
        keep: the number of newest checkpoints that are not deleted; None to delete only leftovers.
        best_step: the step of a checkpoint that is not deleted either; None if there is none.
    """
    try:
        steps = saved_steps(root)
        for step in steps[: max(0, len(steps) - keep)] if keep is not None else []:
            if step != best_step:  # renamed first, so that an interrupted deletion leaves no partial checkpoint
                os.replace(root / step_name(step), free_name(root / step_name(step), "pruned"))
        for path in entries(root):
            if _LEFTOVER.fullmatch(path.name):
                path.unlink() if path.is_symlink() else shutil.rmtree(path)
    except OSError as error:  # the newest checkpoint is complete: go on, and try again after the next one
        log.warning("old checkpoints cannot be deleted: %s", error)
