"""A checkpoint, which does not depend on the parallel mode: its files, reading it, and choosing one of a run.

Its files are listed in docs/checkpoints-and-resume.md.

A checkpoint may come from somebody else, and then correct hashes do not make it safe. So links, pipes and devices are
not opened, a pickle cannot run code or claim more memory than its file takes, and whoever loads a value checks it
first (see `content_checks.py`).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from runner.config.errors import ConfigError
from runner.storage.content_checks import UnexpectedContentError, check_count, check_like
from runner.storage.files import utf8_path
from runner.storage.manifest import NAME as MANIFEST
from runner.storage.manifest import DamagedError, untrusted, verified_manifest
from runner.storage.run_directory import step_name, step_of
from runner.storage.safe_torch_load import load_tensors
from runner.storage.saved_run import checkpoints
from runner.system.torch_errors import is_out_of_memory

log = logging.getLogger(__name__)

MODEL, EMA, STATE = "model.safetensors", "ema.safetensors", "state.pt"

_ANOTHER = "name another checkpoint of the run"
_SAVE_ONE = "let the run save one (keep=1 or more), or name another run"


@dataclass
class Checkpoint:
    """The content of one checkpoint.

    Args:
        step: number of optimizer steps done.
        tensors: the full tensors of the model, by parameter or buffer name.
        state: the state that is the same on all ranks.
        local: the state of this rank; empty if the checkpoint has no state for this rank.
        world_size: number of ranks that wrote the checkpoint.
        ema: as `tensors`, but with averaged weights; empty if the run does not average the weights.
    """

    step: int
    tensors: dict[str, torch.Tensor]
    state: dict[str, Any]
    local: dict[str, Any]
    world_size: int = 1
    ema: dict[str, torch.Tensor] = field(default_factory=dict)


def load(path: Path, rank: int = 0) -> Checkpoint:
    """Load the checkpoint in the directory `path` for `rank`, after verifying the hashes of all its files.

    Raises:
        DamagedError, ConfigError, OSError: as in `verified_manifest`, or if a file has other content than a run writes.
    """
    manifest = verified_manifest(path)
    for name in (MODEL, STATE):
        if name not in manifest["files"]:
            raise untrusted(path, f"{MANIFEST} does not list {name}")

    def content(name: str) -> dict[str, Any]:
        return _content(path / name) if name in manifest["files"] else {}

    tensors, state, local, ema = map(content, (MODEL, STATE, rank_file(rank), EMA))
    return Checkpoint(manifest["step"], tensors, state, local, manifest["world_size"], ema)


def _content(file: Path) -> dict[str, Any]:
    try:
        if file.suffix == ".safetensors":
            with utf8_path(file) as name:
                content: Any = safetensors.torch.load_file(name)
        else:
            content = load_tensors(file)
    except Exception as error:  # content that no run wrote raises anything from EOFError to UnicodeDecodeError
        if is_out_of_memory(error):
            raise
        why = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        raise untrusted(file.parent, f"the hashes are correct, but the content of {file.name} is not: {why}") from None
    if not isinstance(content, dict):
        raise untrusted(file.parent, f"{file.name} contains {type(content).__name__} instead of a dict")
    return content


def rank_file(rank: int) -> str:
    return f"rank_{rank}.pt"


def chosen_checkpoint(run: Path, choice: str | int) -> Path:
    """Return the path of the checkpoint `best`, `last` (the newest intact one) or of a step in the run directory `run`.

    Raises:
        ConfigError: with the key `checkpoint`, if there is no such checkpoint, or it cannot be read.
    """
    try:
        if choice == "last":
            return _last_checkpoint(run)
        if choice == "best":
            return _best_checkpoint(run)
        steps = [str(step_of(path)) for path in checkpoints(run)]
        remedy = f"choose best, last, or one of {', '.join(steps)}" if steps else _SAVE_ONE
        if not str(choice).isdecimal() or len(str(choice)) >= 20:
            raise ConfigError("checkpoint", choice, "it is not a step", remedy)
        path = run / "checkpoints" / step_name(int(choice))
        if not path.is_dir():
            raise ConfigError("checkpoint", choice, f"there is no {path.name}", remedy)
        return path
    except (DamagedError, UnexpectedContentError, OSError) as error:
        raise ConfigError("checkpoint", str(run), str(error), _ANOTHER) from None
    except ConfigError as error:
        raise ConfigError("checkpoint", error.got, error.why, error.remedy) from None


def _last_checkpoint(run: Path) -> Path:
    """Return the path of the newest intact checkpoint of `run`; log a warning for each newer one that is damaged."""
    found = checkpoints(run)
    for path in reversed(found):
        try:
            verified_manifest(path)
            return path
        except DamagedError as error:
            log.warning("%s; trying the previous checkpoint", error)
    why = "none of its checkpoints is intact" if found else "it has no checkpoint yet"
    raise ConfigError("checkpoint", str(run), why, "train it again, or name another run" if found else _SAVE_ONE)


def _best_checkpoint(run: Path) -> Path:
    """Return the path of the checkpoint with the best evaluation, whose step is recorded in the newest checkpoint."""
    checkpoint = load(_last_checkpoint(run))
    best: Any = checkpoint.state.get("best")
    check_like(best, dict, "the best evaluation")
    if not best:
        raise ConfigError("checkpoint", "best", f"{run} has not been evaluated", "take last, the newest one")
    check_count(best.get("step"), "the best evaluation, step", most=checkpoint.step)
    path = run / "checkpoints" / step_name(best["step"])
    if not path.is_dir():
        raise ConfigError("checkpoint", "best", f"{path} does not exist", "take last, the newest one, or name another")
    return path
