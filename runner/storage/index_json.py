"""`checkpoints/index.json`, which names the last and the best checkpoint of a run, for people and other programs.

Rank 0 writes the file atomically after each checkpoint is committed and before old checkpoints are deleted, so the
checkpoints that it names exist. If the run is killed between the commit and the writing, the file names the previous
checkpoint as the last one until the run is resumed. Nothing in this project reads the file: the checkpoints themselves,
whose hashes are verified, record which one is the best. Symbolic links named `last` and `best` cannot be used
instead of the file, because a run directory with links is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runner.storage.durable_write import write_json
from runner.storage.run_directory import step_name

INDEX = "index.json"


def write_index(root: Path, last_step: int, best: Mapping[str, Any]) -> None:
    """Write the index of the directory `root`, such as `{"last": {"checkpoint": "step_00000040", "step": 40}, …}`.

    Args:
        root: the directory of the checkpoints.
        last_step: the step of the newest checkpoint.
        best: a dict with the `metric`, the `value` and the `step` of the best evaluation; empty if there was no
            evaluation. If this dict is empty, or there is no checkpoint of its step, the index contains `"best": null`.

    Raises:
        OSError: as in `write_text`.
    """
    step = best.get("step")
    index: dict[str, Any] = {"last": {"checkpoint": step_name(last_step), "step": last_step}, "best": None}
    if step is not None and (root / step_name(step)).is_dir():
        index["best"] = {"checkpoint": step_name(step), **best}
    write_json(root / INDEX, index)
