"""A checkpoint, which does not depend on the parallel mode: its files, reading it, and choosing one of a run.

Its files are listed in docs/checkpoints-and-resume.md.

Its manifest has the SHA-256 of each file and of itself, which are verified before loading. A checkpoint may come from
somebody else, and then correct hashes do not make it safe. So links, pipes and devices are not opened, a pickle cannot
run code or claim more memory than its file takes, and whoever loads a value checks it first (see `content_checks.py`).
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import re
import reprlib
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch

from runner.config.errors import ConfigError
from runner.storage.content_checks import UnexpectedContentError, check_known
from runner.storage.files import UnsafeFileError, check_no_link, open_regular, read_regular
from runner.storage.run_directory import MAX_BYTES, step_name, step_of
from runner.storage.safe_torch_load import load_tensors
from runner.storage.saved_run import checkpoints
from runner.system.torch_errors import is_out_of_memory

log = logging.getLogger(__name__)

MODEL, EMA, STATE = "model.safetensors", "ema.safetensors", "state.pt"
MANIFEST, SIGNATURE = "manifest.json", "model.json"
SCHEMA = 2

_MAX_BYTES = 2**24
"""Size limit of a manifest in bytes; enough for a manifest with the files of 100,000 ranks."""

_DAMAGE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO)
"""The numbers of the OSErrors that show that a checkpoint is damaged. A missing permission, for example, does not."""

_SAVE_ONE = "let the run save one (keep=1 or more), or name another run"


class DamagedError(Exception):
    """Raised when a file of a checkpoint is missing, or its content is not what was written."""


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
    prefix, suffix = part_file(rank, "*").split("*")
    names = [name for name in manifest["files"] if name.startswith(prefix) and name.endswith(suffix)]
    files = {name.removeprefix(prefix).removesuffix(suffix): path / name for name in names}
    return Checkpoint(manifest["step"], tensors, state, local, ema, part_files=files)


def _content(file: Path) -> dict[str, Any]:
    try:
        if file.suffix == ".safetensors":
            from safetensors.torch import load_file  # configs are checked without torch, which it imports

            content: Any = load_file(file)
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


def part_file(rank: int, name: str) -> str:
    return f"rank_{rank}_{name}.bin"


def manifest_of(directory: Path, known: Mapping[str, str], **facts: Any) -> str:
    """Return the text of a manifest with `facts` and the hashes of all files in `directory`, except those `known`."""
    files = {path.name: known.get(path.name) or _sha256(path) for path in sorted(directory.iterdir())}
    manifest = {"schema": SCHEMA, **facts, "files": files}
    return json.dumps(manifest | {"sha256": _seal(manifest)}, indent=2) + "\n"


def verified_manifest(directory: Path) -> dict[str, Any]:
    """Return the manifest in `directory`, a dict, after verifying the hashes of the files that it lists.

    Its keys are `schema`, `files` (a dict from file name to SHA-256), `world_size`, `step`, and `best`, an evaluation.

    Raises:
        DamagedError: if the manifest or a listed file is missing, or does not match its hash.
        ConfigError: if the checkpoint was written by an incompatible version of this project, or by something else.
        OSError: if a file cannot be read for another reason.
    """
    with _refusals(directory):
        manifest = read_manifest(directory)
        for name, sha256 in manifest["files"].items():
            _verify(directory / name, _sha256(directory / name), sha256)
    return manifest


def hashes_of_shared(directory: Path, other: Path) -> dict[str, str]:
    """Return the hashes, by name, of the files in `directory` that are those of the checkpoint `other`, by hard links.

    They are taken from the manifest of `other`, whose hashes were verified when it was loaded, or computed when it was
    written. If it cannot be read, the result is empty.
    """
    try:
        listed = read_manifest(other)["files"]
        return {name: sha256 for name, sha256 in listed.items() if _is_same_file(directory / name, other / name)}
    except (DamagedError, ConfigError, OSError):
        return {}


def _is_same_file(path: Path, other: Path) -> bool:
    return path.exists() and other.exists() and path.samefile(other)


def saved_text(directory: Path, name: str) -> str | None:
    """Return the content of a text file in a checkpoint; None if the checkpoint was written without this file.

    Only the hashes of the manifest and of this file are verified.

    Raises:
        DamagedError, ConfigError, OSError: as in `verified_manifest`.
    """
    with _refusals(directory):
        sha256 = read_manifest(directory)["files"].get(name)
        if sha256 is None:
            return None
        content = read_regular(directory / name, MAX_BYTES)
        _verify(directory / name, hashlib.sha256(content).hexdigest(), sha256)
    return content.decode(errors="replace")


def untrusted(directory: Path, why: str) -> ConfigError:
    """Return a ConfigError saying that the checkpoint in `directory` cannot be trusted, with the reason `why`."""
    remedy = "no run writes such a checkpoint: do not trust it, and resume another one"
    return ConfigError("resume", str(directory), why, remedy)


@contextmanager
def _refusals(directory: Path) -> Iterator[None]:
    try:
        yield
    except UnsafeFileError as error:
        raise untrusted(directory, f"{error.filename}: {error.strerror}") from None
    except OSError as error:
        if error.errno not in _DAMAGE:
            raise
        raise DamagedError(f"{directory} is damaged: {error.filename}: {error.strerror}") from None


def read_manifest(directory: Path) -> dict[str, Any]:
    """Return what `verified_manifest` returns, after verifying only the hash of the manifest itself."""
    check_no_link(directory)
    path = directory / MANIFEST
    try:
        manifest = json.loads(read_regular(path, _MAX_BYTES).decode())
        intact = manifest.pop("sha256") == _seal(manifest)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedError(f"{path} is damaged: {type(error).__name__}: {str(error)[:200]}") from None
    if not intact:
        raise DamagedError(f"{path} is damaged: its content does not match its SHA-256")
    if manifest.get("schema") != SCHEMA:
        why = f"it has schema {reprlib.repr(manifest.get('schema'))}, this version reads {SCHEMA}"
        raise ConfigError("resume", str(directory), why, "resume with the version that wrote it")
    step, world_size, files = (manifest.get(key) for key in ("step", "world_size", "files"))
    valid = {  # a correct hash is not enough, because anybody can compute a hash
        "step": type(step) is int and step >= 0 and step_of(directory) in (step, None),
        "world_size": type(world_size) is int and world_size >= 1,
        "files": isinstance(files, dict) and all(re.fullmatch(r"\w[\w.-]{0,250}", name, re.ASCII) for name in files),
    }
    for key in [key for key, ok in valid.items() if not ok]:
        raise untrusted(directory, f"{MANIFEST} has a wrong value of {key}: {reprlib.repr(manifest.get(key))}")
    return manifest


def _verify(path: Path, sha256: str, wanted: object) -> None:
    if sha256 != wanted:
        raise DamagedError(f"{path} is damaged: its SHA-256 is not the manifest's")


def _seal(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
    if best == {}:
        raise ConfigError("checkpoint", "best", f"{run} has not been evaluated", "take last, the newest one")
    check_known(best, {"step": range(checkpoint.step + 1)}, ("step",), "the best evaluation")
    path = run / "checkpoints" / step_name(best["step"])
    if not path.is_dir():
        raise ConfigError("checkpoint", "best", f"{path} does not exist", "take last, the newest one, or name another")
    return path
