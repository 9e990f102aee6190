"""Write run directories, checkpoints and sweeps without training, so that every number in them is known."""

import json
import os
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from helpers.compose import compose_config
from runner.storage.checkpoint import Checkpoint
from runner.storage.checkpoints import Checkpoints
from runner.storage.files import renamed_together
from runner.storage.run_directory import step_name
from runner.storage.saved_run import config_files


def write_config(directory: Path, config: dict[str, Any], overrides: list[str]) -> None:
    with renamed_together(config_files(directory, config, overrides)):
        pass


def write_run_directory(path: Path, *overrides: str, **result: Any) -> Path:
    """Write a run directory like those of the command; `result` is the content of `result.json`, omitted if empty."""
    (path / "checkpoints" / "step_00000007").mkdir(parents=True)
    (path / "checkpoints" / "step_00000007" / "model.safetensors").write_bytes(bytes(10_000))
    write_config(path, compose_config(*overrides), list(overrides))
    (path / ".lock").touch()
    if result:
        (path / "result.json").write_text(json.dumps({"status": "done", "steps": 7, **result}))
    return path


def evaluation_entries(best: float, last: float, metric: str = "eval/accuracy", **more: Any) -> dict[str, Any]:
    return {"best": {"metric": metric, "value": best, "step": 5}, "metrics": {metric: last}, **more}


def save_and_wait(checkpoints: Checkpoints, content: Checkpoint, best_step: int | None = None) -> Path:
    checkpoints.save(content, best_step)
    checkpoints.wait()
    return checkpoints.root / step_name(content.step)


def checkpoints_of_two_ranks(directory: Path, timeout: float = 60) -> tuple[Checkpoints, Checkpoints]:
    barrier = threading.Barrier(2)

    def wait() -> None:
        barrier.wait(60)

    first, second = (Checkpoints(directory, 9, rank, 2, wait, timeout) for rank in (0, 1))
    return first, second


def begin_to_save(ranks: Iterable[Checkpoints], contents: Iterable[Checkpoint]) -> None:
    """Let each rank begin to save its content, which needs a thread of its own, as they wait for each other."""
    threads = [threading.Thread(target=rank.save, args=pair) for rank, *pair in zip(ranks, contents, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)


def save_ledger(sweep: Path, *jobs: dict[str, Any], complete: bool = False) -> Path:
    """Write the ledger of a sweep to the directory `sweep`, with a lock file and the console output of its jobs."""
    (sweep / "console").mkdir(parents=True, exist_ok=True)
    entries = {str(number): {"config_hash": "a"} | job for number, job in enumerate(jobs)}
    for number in range(len(jobs)):
        (sweep / "console" / f"{number:03d}.txt").write_text("printed\n")
    (sweep / ".lock").touch()
    (sweep / "sweep.json").write_text(json.dumps({"typed": [], "complete": complete, "jobs": entries}))
    return sweep


def set_age_days(path: Path, days: float) -> Path:
    """Set the modification times of a run directory and its files to `days` ago."""
    then = time.time() - days * 86400
    for file in (*path.rglob("*"), path):
        os.utime(file, (then, then))
    return path
