"""A checkpoint, which does not depend on the parallel mode: its files, reading it, and choosing one of a run.

Its files are listed in docs/checkpoints-and-resume.md.

Its manifest has the SHA-256 of each file and of itself, which are verified before loading. A checkpoint may come from
somebody else, and then correct hashes do not make it safe. So links, pipes and devices are not opened, a pickle cannot
run code or claim more memory than its file takes, and whoever loads a value checks it first (see `value_checks.py`).
"""

from __future__ import annotations

import functools
import logging
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError

from runner.config.errors import ConfigError, check
from runner.storage import state_dict
from runner.storage.manifest import MANIFEST, DamagedError, untrusted, verified_manifest
from runner.storage.run_directory import step_name, step_of
from runner.storage.safe_torch_load import load_tensors
from runner.storage.saved_run import checkpoints
from runner.storage.value_checks import UnexpectedContentError, check_known
from runner.system.torch_errors import is_out_of_memory

log = logging.getLogger(__name__)

MODEL, EMA, STATE = "model.safetensors", "ema.safetensors", "state.pt"
SIGNATURE = "model.json"

_SAVE_ONE = "let the run save one (keep=1 or more), or name another run"


@dataclass
class Part:
    """A piece of a rank's state that never changes: a file of its own, which later checkpoints share by a hard link.

    Args:
        write: function that writes the content to an open file.
        written: set once the content was written, or that failed; until then, the memory must not be overwritten.
    """

    write: Callable[[BinaryIO], object]
    written: threading.Event = field(default_factory=threading.Event)


@dataclass
class Checkpoint:
    """The content of one checkpoint.

    Args:
        step: number of optimizer steps done.
        tensors: the full tensors of the model, by parameter or buffer name.
        state: the state that is the same on all ranks.
        local: the state of this rank; empty if the checkpoint has no state for this rank.
        ema: as `tensors`, but with averaged weights; empty if the run does not average the weights.
        parts: further state of this rank to save, by name; a name stands for the same content in a whole run.
        part_files: the files of the parts of a loaded checkpoint, by name, whose hashes are correct.
    """

    step: int
    tensors: dict[str, torch.Tensor]
    state: dict[str, Any]
    local: dict[str, Any]
    ema: dict[str, torch.Tensor] = field(default_factory=dict)
    parts: dict[str, Part] = field(default_factory=dict)
    part_files: dict[str, Path] = field(default_factory=dict)


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
    for name, beside in zip((MODEL, EMA), (tensors, ema), strict=True):
        others = state.pop(name, {})
        if not isinstance(others, dict) or others.keys() & beside.keys():
            raise untrusted(path, f"the hashes are correct, but {STATE} has another {name} beside it")
        beside.update(others)
    prefix, suffix = part_file(rank, "*").split("*")
    names = [name for name in manifest["files"] if name.startswith(prefix) and name.endswith(suffix)]
    files = {name.removeprefix(prefix).removesuffix(suffix): path / name for name in names}
    return Checkpoint(manifest["step"], tensors, state, local, ema, part_files=files)


def _content(file: Path) -> dict[str, Any]:
    try:
        if file.suffix == ".safetensors":
            content: Any = state_dict.read(file)
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


def beside_tensors(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what safetensors cannot hold: the extra state of modules, and tensors of some dtypes, as complex128."""
    return {name: v for name, v in state.items() if not (isinstance(v, torch.Tensor) and _is_known(v.dtype))}


@functools.cache
def _is_known(dtype: torch.dtype) -> bool:
    from safetensors.torch import save

    try:
        return bool(save({"": torch.zeros(2, dtype=dtype)}))
    except (KeyError, RuntimeError, SafetensorError, ValueError):
        return False


def reread(value: Any) -> Any:
    """Return `value` after it was written, and read as content of a checkpoint that may be anybody's.

    Raises any exception if that is not possible.
    """
    with tempfile.TemporaryDirectory(prefix="runner-") as scratch:
        torch.save(value, file := Path(scratch, "value.pt"))
        return load_tensors(file)


def rank_file(rank: int) -> str:
    return f"rank_{rank}.pt"


def part_file(rank: int, name: str) -> str:
    return f"rank_{rank}_{name}.bin"


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
        paths = {str(step_of(path)): path for path in checkpoints(run)}
        if str(choice) in paths:
            return paths[str(choice)]
        remedy = f"choose best, last, or one of {', '.join(paths)}" if paths else _SAVE_ONE
        raise ConfigError("checkpoint", choice, "there is no such checkpoint", remedy)
    except (DamagedError, UnexpectedContentError, OSError) as error:
        raise ConfigError("checkpoint", str(run), str(error), "name another checkpoint of the run") from None
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
    check(best != {}, "checkpoint", "best", f"{run} has no best evaluation", "take last, the newest one")
    check_known(best, {"step": range(checkpoint.step + 1)}, ("step",), "the best evaluation")
    path = run / "checkpoints" / step_name(best["step"])
    check(path.is_dir(), "checkpoint", "best", f"{path} does not exist", "take last, the newest one, or name another")
    return path
