"""`python -m runner convert SOURCE DESTINATION` extracts the weights of a run, or converts a file of weights.

The format of the written weights does not depend on the parallel mode: `model.weights=DESTINATION` starts a run in any
mode from these weights, and other programs can load them. Reading SOURCE never executes code that is hidden in it, and
the hashes of a checkpoint are verified before it is read. If DESTINATION is a .pt2 or .onnx file, the model of a run is
exported as a program instead.
"""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from runner.commands.arguments import Parser
from runner.commands.export_program import PROGRAMS, export_program
from runner.config.errors import ConfigError, check
from runner.config.overrides import text_override
from runner.model.weights import read_weights
from runner.storage.checkpoint import EMA, chosen_checkpoint
from runner.storage.files import check_readable
from runner.storage.manifest import NAME as MANIFEST
from runner.storage.manifest import SIGNATURE, DamagedError, verified_manifest
from runner.storage.run_directory import step_of
from runner.storage.signature import saved_signature
from runner.system.exit_codes import DONE, REFUSED

Tensors = dict[str, torch.Tensor]

PREFIX = "module."
"""The prefix of parameter names in the state dict of DataParallel and DistributedDataParallel."""

_MODEL = "model.safetensors"


def _save_state_dict(tensors: Tensors, path: Path, _: dict[str, str] | None) -> None:
    torch.save(tensors, path)  # a state dict has no place for metadata


_WRITERS: dict[str, Callable[[Tensors, Path, dict[str, str] | None], None]] = {
    ".safetensors": save_file,
    ".pt": _save_state_dict,
    ".pth": _save_state_dict,
}


class Weights(NamedTuple):
    """Weights and where they come from."""

    tensors: Tensors
    origin: str
    signature: Mapping[str, Any] = {}
    """The shape of an input and the names of the classes or targets (see `Workload.signature`), if they are known."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, and return the exit code: 0, or 2 after printing an error message to standard error."""
    parser = Parser("convert", __doc__)
    parser.add_argument("source", metavar="SOURCE", help="a run directory, a checkpoint in it, or a file of weights")
    formats = "weights: a .safetensors file, or a state dict as .pt or .pth; the model as a program: .pt2 or .onnx"
    parser.add_argument("destination", metavar="DESTINATION", help=formats)
    parser.add_checkpoint(None)  # the default is told from what is typed, which a checkpoint or a file refuses
    parser.add_argument(
        "--module-prefix", action="store_true", help=f"prefix names with {PREFIX}, as DataParallel does"
    )
    parser.add_argument("--force", action="store_true", help="replace DESTINATION if it exists")
    try:
        options = parser.parsed(arguments)
        source, destination = (Path(os.path.expanduser(path)) for path in (options.source, options.destination))
        check_destination(destination, options.force)
        if destination.suffix in PROGRAMS:
            if options.module_prefix:
                raise ConfigError("--module-prefix", True, "a program has no names of parameters", "leave it out")
            checkpoint = checkpoint_of(source, options.checkpoint)
            if checkpoint is None:
                why = "it is not a run"
                raise ConfigError("SOURCE", str(source), why, "name a run directory, or a checkpoint in one")
            export_program(checkpoint, destination)
            print(f"{destination}: the model of {checkpoint}; its outputs were compared")
            return DONE
        weights = read(source, options.checkpoint)
        write(weights.tensors, destination, PREFIX if options.module_prefix else "", weights.signature)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return REFUSED
    values = sum(tensor.numel() for tensor in weights.tensors.values())
    print(f"{destination}: {len(weights.tensors)} tensors, {values:,} values, from {weights.origin}")
    print(f"start from it: {text_override('model.weights', destination)}")
    return DONE


def check_destination(path: Path, force: bool) -> None:
    """Check that the output file can be written, before the weights are read.

    Raises:
        ConfigError: if the suffix of `path` is not supported, if it is a directory, if it exists and `force` is False,
            or if its parent directory is missing, is not accessible or is a checkpoint.
    """
    formats = "name a .safetensors file, a state dict as .pt or .pth, or a program as .pt2 or .onnx"
    why = f"its suffix must be one of {', '.join((*_WRITERS, *PROGRAMS))}"
    check(path.suffix in (*_WRITERS, *PROGRAMS), "DESTINATION", str(path), why, formats)
    check_readable("DESTINATION", path)
    check(path.parent.is_dir(), "DESTINATION", str(path), "there is no such directory", f"mkdir -p {path.parent}")
    check(not path.is_dir(), "DESTINATION", str(path), "it is a directory", formats)
    elsewhere = "write it elsewhere: a checkpoint must not change"
    check(not (path.parent / MANIFEST).exists(), "DESTINATION", str(path), "it is inside a checkpoint", elsewhere)
    check(force or not path.exists(), "DESTINATION", str(path), "it already exists", "--force replaces it")


def checkpoint_of(source: Path, choice: str | None) -> Path | None:
    """Return the checkpoint that `source` names: a run directory, a checkpoint in one, or a file in a checkpoint.

    Args:
        source: the path.
        choice: for a run directory, `best`, `last` or a step; None for the best, and for anything else.

    Returns:
        None if `source` is none of them.
    """
    check_readable("SOURCE", source / "checkpoints")
    if (source / "checkpoints").is_dir():
        try:
            return chosen_checkpoint(source, choice or "best")
        except ConfigError as error:
            key = "--checkpoint" if error.got == (choice or "best") else "SOURCE"
            raise ConfigError(key, error.got, error.why, error.remedy) from None
    if choice is not None:
        why = f"{source} is not a run directory"
        raise ConfigError("--checkpoint", choice, why, "leave it out, or name the run directory as SOURCE")
    if source.name in (_MODEL, EMA) and (source.parent / MANIFEST).is_file():
        return source.parent
    return source if (source / MANIFEST).exists() or step_of(source) is not None else None


def read(source: Path, choice: str | None = None) -> Weights:
    """Read weights from a run directory, from a checkpoint or from a file; see `checkpoint_of`.

    From a checkpoint, the weights that an evaluation uses are read, which may be averages, unless a file is named.

    Raises:
        ConfigError: if `source` does not exist, cannot be read, contains no weights, or contains damaged weights.
    """
    others = "name a run directory, a checkpoint in one, or a file of weights"
    checkpoint = checkpoint_of(source, choice)
    check(source.exists(), "SOURCE", str(source), "there is no such file or directory", others)
    if checkpoint is None:
        check(source.is_file(), "SOURCE", str(source), "it contains no checkpoint", others)
        try:
            return Weights(read_weights(str(source)), str(source))
        except ConfigError as error:
            raise ConfigError("SOURCE", error.got, error.why, error.remedy) from None
    try:
        manifest = verified_manifest(checkpoint)
        name = source.name if source.parent == checkpoint else EMA if EMA in manifest["files"] else _MODEL
        if name not in manifest["files"]:  # it may be a pipe or a device
            raise DamagedError(f"{checkpoint / MANIFEST} does not list {name}")
        origin = f"{checkpoint}, after step {manifest['step']}{', averaged' if name == EMA else ''}"
        return Weights(load_file(checkpoint / name), origin, saved_signature(checkpoint))
    except (ConfigError, DamagedError, SafetensorError, OSError) as error:
        why = error.why if isinstance(error, ConfigError) else str(error)
        raise ConfigError("SOURCE", str(checkpoint), why, "name another checkpoint of the run") from None


def write(tensors: Tensors, path: Path, prefix: str = "", signature: Mapping[str, Any] | None = None) -> None:
    """Write `tensors` to the file `path` atomically, in the format given by the suffix of `path`.

    Args:
        tensors: tensors by name.
        path: a .safetensors, .pt or .pth file.
        prefix: a prefix that is added to each name.
        signature: the signature (see `Weights`), which only a .safetensors file can store.

    Raises:
        ConfigError: if the format does not support a tensor, or the file cannot be written.
    """
    # Contiguous copies: safetensors rejects tensors that share memory, and torch.save would write the whole storage.
    named = {prefix + name: t.detach().clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.touch()
        mode = stat.S_IMODE(part.stat().st_mode)  # from the umask, which safetensors does not follow
        _WRITERS[path.suffix](named, part, {SIGNATURE: json.dumps(signature)} if signature else None)
        part.chmod(mode)
        with part.open("rb") as file:
            os.fsync(file.fileno())  # before the rename, or a crash could leave an empty file
        os.replace(part, path)
    except (OSError, RuntimeError, ValueError, KeyError, SafetensorError) as error:
        why = f"it cannot be written: {str(error).splitlines()[0]}"
        remedy = "make room, or write it elsewhere; .pt takes any tensor"
        raise ConfigError("DESTINATION", str(path), why, remedy) from None
    finally:
        with suppress(OSError):  # the same error again
            part.unlink()
