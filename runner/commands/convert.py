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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from runner.commands.arguments import Parser
from runner.config.errors import ConfigError, check
from runner.config.overrides import text_override
from runner.model.weights import read_weights
from runner.storage.checkpoint import EMA
from runner.storage.checkpoint_selection import chosen_checkpoint
from runner.storage.manifest import NAME as MANIFEST
from runner.storage.manifest import SIGNATURE, DamagedError, untrusted, verified_manifest
from runner.storage.regular_file import check_readable
from runner.storage.run_directory import step_of
from runner.storage.signature import saved_signature

Tensors = dict[str, torch.Tensor]

PREFIX = "module."
"""The prefix of parameter names in the state dict of DataParallel and DistributedDataParallel."""

_CHECKPOINT_WEIGHTS = "model.safetensors"


def _save_state_dict(tensors: Tensors, path: Path, _: dict[str, str] | None) -> None:
    torch.save(tensors, path)  # a state dict has no place for metadata


_WRITERS: dict[str, Callable[[Tensors, Path, dict[str, str] | None], None]] = {
    ".safetensors": save_file,
    ".pt": _save_state_dict,
    ".pth": _save_state_dict,
}


PROGRAMS = (".pt2", ".onnx")
"""The suffixes of exported programs: .pt2 for `torch.export`, .onnx for ONNX."""


class Weights(NamedTuple):
    """Weights and their origin.

    Args:
        tensors: tensors by name, on the CPU.
        origin: a description of the file or checkpoint from which the weights were read.
        signature: the shape of an input and the names of the classes or targets (see `Workload.signature`); empty if
            they are not known.
    """

    tensors: Tensors
    origin: str
    signature: Mapping[str, Any] = {}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, and return the exit code: 0, or 2 after printing an error message to standard error."""
    try:
        options = _parser().parsed(arguments)
        source, destination = (Path(os.path.expanduser(path)) for path in (options.source, options.destination))
        check_destination(destination, options.force)
        if destination.suffix in PROGRAMS:
            print(exported(source, destination, options.checkpoint, options.module_prefix))
            return 0
        weights = read(source, options.checkpoint)
        write(weights.tensors, destination, PREFIX if options.module_prefix else "", weights.signature)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    values = sum(tensor.numel() for tensor in weights.tensors.values())
    print(f"{destination}: {len(weights.tensors)} tensors, {values:,} values, from {weights.origin}")
    print(f"start from it: {text_override('model.weights', destination)}")
    return 0


def exported(source: Path, destination: Path, choice: str | None, module_prefix: bool) -> str:
    """Export the model of a run as a program for torch.export or ONNX, and return the message to print.

    Args:
        source: a run directory, or a checkpoint in one.
        destination: a .pt2 or .onnx file; replaced if it exists.
        choice: the checkpoint of the run: `best`, `last` or a step; None for the best one. It must be None if `source`
            is a checkpoint.
        module_prefix: whether --module-prefix was typed. This flag is not allowed, because a program has no names of
            parameters.

    Raises:
        ConfigError: if `choice` or `module_prefix` is not allowed, a package is missing, there is no such checkpoint,
            it cannot be read, or its model cannot be exported.
    """
    from runner.commands.export_program import (  # imported here: they need a run's modules
        check_exporter,
        export_program,
    )

    check(not module_prefix, "--module-prefix", True, "a program has no names of parameters", "leave it out")
    check_readable("SOURCE", source / "checkpoints")
    if step_of(source) is not None:
        _check_not_chosen(source, choice)
    check_exporter(destination)
    checkpoint = export_program(source, choice or "best", destination)
    return f"{destination}: the model of {checkpoint}; its outputs were compared"


def _parser() -> Parser:
    parser = Parser("convert", "Extract the weights of a run, or convert a file of weights.")
    parser.add_argument("source", metavar="SOURCE", help="a run directory, a checkpoint in it, or a file of weights")
    parser.add_argument(
        "destination",
        metavar="DESTINATION",
        help="weights: a .safetensors file, or a state dict as .pt or .pth; the model as a program: .pt2 or .onnx",
    )
    parser.add_checkpoint(None)  # the default is told from what is typed, which a checkpoint or a file refuses
    parser.add_argument(
        "--module-prefix", action="store_true", help=f"prefix each name with {PREFIX}, as DataParallel does"
    )
    parser.add_argument("--force", action="store_true", help="replace DESTINATION if it exists")
    return parser


def check_destination(path: Path, force: bool) -> None:
    """Check that the output file can be written, before the weights are read.

    Args:
        path: the output file (DESTINATION).
        force: whether an existing file may be replaced.

    Raises:
        ConfigError: if the suffix of `path` is not supported, if `path` is a directory, if it exists and `force` is
            False, or if its parent directory is missing, is not accessible or is a checkpoint.
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


def read(source: Path, choice: str | None = None) -> Weights:
    """Read weights from a run directory, from a checkpoint or from a file.

    Args:
        source: a run directory, a checkpoint in a run directory, or a file of weights.
        choice: if `source` is a run directory, which of its checkpoints is read: `best`, `last` or a step; None for the
            best one. It must be None if `source` is anything else.

    Raises:
        ConfigError: if `source` does not exist, cannot be read, contains no weights, or contains damaged weights. Also
            if there is no such checkpoint, or `choice` is not allowed.
    """
    others = "name a run directory, a checkpoint in one, or a file of weights"
    check_readable("SOURCE", source / "checkpoints")
    check(source.exists(), "SOURCE", str(source), "there is no such file or directory", others)
    named = ""
    if source.name in (_CHECKPOINT_WEIGHTS, EMA) and (source.parent / MANIFEST).is_file():
        source, named = source.parent, source.name  # read as a checkpoint, which verifies the hash
    if (source / "checkpoints").is_dir():
        return _read_checkpoint(_chosen(source, choice or "best"))
    _check_not_chosen(source, choice)
    if source.is_file():
        return Weights(_read_file(source), str(source))
    is_checkpoint = (source / MANIFEST).exists() or step_of(source) is not None
    check(is_checkpoint, "SOURCE", str(source), "it contains no checkpoint", others)
    return _read_checkpoint(source, named)


def _check_not_chosen(source: Path, choice: str | None) -> None:
    """Raise a `ConfigError` if a checkpoint was chosen with a flag, although `source` is not a run directory."""
    why = f"{source} is not a run directory"
    check(choice is None, "--checkpoint", choice, why, "leave it out, or name the run directory as SOURCE")


def _chosen(run: Path, choice: str) -> Path:
    """Return the path of the checkpoint of `run` that `choice` names.

    Raises:
        ConfigError: with the key --checkpoint if there is no such checkpoint; with the key SOURCE for other errors.
    """
    try:
        return chosen_checkpoint(run, choice)
    except ConfigError as error:
        key = "--checkpoint" if error.got == choice else "SOURCE"
        raise ConfigError(key, error.got, error.why, error.remedy) from None


def _read_checkpoint(path: Path, named: str = "") -> Weights:
    """Read weights from the checkpoint at `path`.

    Args:
        path: the directory of the checkpoint.
        named: the name of the file of weights in this directory. If it is empty, the weights that an evaluation uses
            are read: the averaged weights if the checkpoint has them, otherwise the weights of the model.

    Raises:
        ConfigError: if the checkpoint cannot be read, is damaged, or does not contain the file.
    """
    with _errors_as_source(path):
        manifest = verified_manifest(path)
        name = named or (EMA if EMA in manifest["files"] else _CHECKPOINT_WEIGHTS)
        if name not in manifest["files"]:  # it may be a pipe or a device
            raise untrusted(path, f"{MANIFEST} does not list {name}")
        origin = f"{path}, after step {manifest['step']}{', averaged' if name == EMA else ''}"
        return Weights(load_file(path / name), origin, saved_signature(path))


@contextmanager
def _errors_as_source(checkpoint: Path) -> Iterator[None]:
    """Raise a `ConfigError` with the key SOURCE if the body of the context cannot read `checkpoint`."""
    why = ""
    try:
        yield
    except ConfigError as error:
        why = error.why
    except (DamagedError, SafetensorError, OSError) as error:
        why = str(error)
    check(not why, "SOURCE", str(checkpoint), why, "name another checkpoint of the run")


def _read_file(path: Path) -> Tensors:
    try:
        return read_weights(str(path))
    except ConfigError as error:
        raise ConfigError("SOURCE", error.got, error.why, error.remedy) from None


def write(tensors: Tensors, path: Path, prefix: str = "", signature: Mapping[str, Any] | None = None) -> None:
    """Write `tensors` to the file `path` atomically, in the format given by the suffix of `path`.

    Args:
        tensors: tensors by name.
        path: a .safetensors, .pt or .pth file.
        prefix: a prefix that is added to each name.
        signature: the signature (see `Weights`) to store in the metadata of a .safetensors file; None to store none.
            Other formats have no metadata.

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
        raise ConfigError(
            "DESTINATION", str(path), why, "make room, or write it elsewhere; .pt takes any tensor"
        ) from None
    finally:
        with suppress(OSError):  # the same error again
            part.unlink()
