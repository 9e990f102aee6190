"""`python -m runner.tools.convert SOURCE DESTINATION`: the weights of a run, or of a file, as plain weights.

A checkpoint knows no mode, so what is written fits every mode: `model.weights=DESTINATION` starts a run from it, and
any other program can load it. Nothing that is read can run code, and a checkpoint is checked against its hashes first.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from runner.config.errors import ConfigError, check
from runner.model.weights import read_weights
from runner.storage.checkpoint import load
from runner.storage.manifest import NAME as MANIFEST
from runner.storage.manifest import DamagedError, verified_manifest
from runner.storage.run_directory import step_name, step_of

Tensors = dict[str, torch.Tensor]

PREFIX = "module."
"""What DataParallel and DistributedDataParallel put before every name."""

_OF_A_CHECKPOINT = "model.safetensors"
_WRITERS: dict[str, Callable[[Tensors, Path], None]] = {
    ".safetensors": save_file,
    ".pt": torch.save,
    ".pth": torch.save,
}


class Weights(NamedTuple):
    """Tensors by their plain names, on the CPU, and in words where they come from."""

    tensors: Tensors
    origin: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Convert what the command line names; returns the exit code: 0, or 2 with the reason on standard error."""
    options = _parser().parse_args(arguments)
    destination = Path(options.destination).expanduser()
    try:
        check_destination(destination, options.force)
        weights = read(Path(options.source).expanduser(), options.best)
        write(weights.tensors, destination, PREFIX if options.module_prefix else "")
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    values = sum(tensor.numel() for tensor in weights.tensors.values())
    print(f"{destination}: {len(weights.tensors)} tensors, {values:,} values, from {weights.origin}")
    print(f"start from it: python -m runner model.weights={shlex.quote(str(destination))} …")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m runner.tools.convert", description="Write a run's weights by themselves."
    )
    parser.add_argument("source", metavar="SOURCE", help="a run directory, a checkpoint in it, or a file of weights")
    parser.add_argument(
        "destination", metavar="DESTINATION", help="a .safetensors file, or a state_dict as .pt or .pth"
    )
    parser.add_argument("--best", action="store_true", help="of a run directory its best checkpoint, not its newest")
    parser.add_argument(
        "--module-prefix", action="store_true", help=f"put {PREFIX} before each name, as DataParallel does"
    )
    parser.add_argument("--force", action="store_true", help="replace DESTINATION if it is there")
    return parser


def check_destination(path: Path, force: bool) -> None:
    """Refuse what cannot be written, before anything is read.

    Raises:
        ConfigError: for another suffix, a file that is there, a missing directory, and a checkpoint's own files.
    """
    formats = "name a .safetensors file, or a state_dict as .pt or .pth"
    check(path.suffix in _WRITERS, "DESTINATION", str(path), f"it is none of {', '.join(_WRITERS)}", formats)
    check(path.parent.is_dir(), "DESTINATION", str(path), "there is no such directory", f"mkdir -p {path.parent}")
    check(not path.is_dir(), "DESTINATION", str(path), "it is a directory", formats)
    elsewhere = "write it elsewhere: a checkpoint stays as its manifest says"
    check(not (path.parent / MANIFEST).exists(), "DESTINATION", str(path), "it lies in a checkpoint", elsewhere)
    check(force or not path.exists(), "DESTINATION", str(path), "it is there already", "--force replaces it")


def read(source: Path, best: bool = False) -> Weights:
    """The weights in `source`: a run directory, a checkpoint in it, or a file.

    Args:
        best: of a run directory the checkpoint with the best evaluation; otherwise the newest that is whole.

    Raises:
        ConfigError: when there are none, when they are damaged, and when `best` is asked of a single checkpoint.
    """
    others = "name a run directory, a checkpoint in one, or a file of weights"
    check(source.exists(), "SOURCE", str(source), "there is no such file or directory", others)
    if source.name == _OF_A_CHECKPOINT and (source.parent / MANIFEST).is_file():
        source = source.parent  # what has a hash is checked against it
    if (source / "checkpoints").is_dir():
        return _of_checkpoint(_best(source) if best else _newest(source))
    check(not best, "--best", True, f"{source} is no run directory", "name the run directory that it is from")
    if source.is_file():
        return Weights(_of_file(source), str(source))
    there = (source / MANIFEST).exists() or step_of(source) is not None
    check(there, "SOURCE", str(source), "it holds no checkpoint", others)
    return _of_checkpoint(source)


def _newest(run: Path) -> Path:
    """The newest whole checkpoint of a run; damaged ones are named, and left as they are: it may be running."""
    found = [path for path in (run / "checkpoints").iterdir() if step_of(path) is not None]
    for path in sorted(found, key=lambda path: step_of(path) or 0, reverse=True):
        try:
            verified_manifest(path)
            return path
        except DamagedError as error:
            print(f"{error}; going back to the one before", file=sys.stderr)
    why = "none of its checkpoints is whole" if found else "it has no checkpoint yet"
    raise ConfigError("SOURCE", str(run), why, "let the run save one (keep=1 or more), or name another")


def _best(run: Path) -> Path:
    """The checkpoint that the newest one calls the best of the run."""
    newest = _newest(run)
    with _refusing(newest):
        best: dict[str, Any] = load(newest).state["best"]
    check(bool(best), "--best", True, f"{run} has not been evaluated", "leave out --best: its newest checkpoint")
    path = newest.with_name(step_name(best["step"]))
    check(path.is_dir(), "--best", True, f"{path} is gone", "leave out --best, or name another checkpoint")
    return path


def _of_checkpoint(path: Path) -> Weights:
    with _refusing(path):
        manifest = verified_manifest(path)
        return Weights(load_file(path / _OF_A_CHECKPOINT), f"{path}, after step {manifest['step']}")


@contextmanager
def _refusing(checkpoint: Path) -> Iterator[None]:
    """Say of whatever is wrong with `checkpoint` that it is SOURCE that cannot be read."""
    why = ""
    try:
        yield
    except ConfigError as error:
        why = error.why
    except (DamagedError, SafetensorError, OSError) as error:
        why = str(error)
    check(not why, "SOURCE", str(checkpoint), why, "name another checkpoint of the run")


def _of_file(path: Path) -> Tensors:
    try:
        return read_weights(str(path))
    except ConfigError as error:
        raise ConfigError("SOURCE", error.got, error.why, error.remedy) from None


def write(tensors: Tensors, path: Path, prefix: str = "") -> None:
    """Write `tensors` to `path` in the format of its suffix, whole or not at all.

    Args:
        prefix: put before each name.

    Raises:
        ConfigError: when the format has no such tensors, or the disk no room.
    """
    # Copies: contiguous, and sharing no memory: safetensors takes nothing else, and torch.save would write all of it.
    named = {prefix + name: t.detach().clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        _WRITERS[path.suffix](named, part)
        with part.open("rb") as file:
            os.fsync(file.fileno())  # or a crash could leave the name without the bytes
        os.replace(part, path)
    except (OSError, RuntimeError, ValueError, KeyError, SafetensorError) as error:
        why = f"it cannot be written: {str(error).splitlines()[0]}"
        raise ConfigError(
            "DESTINATION", str(path), why, "make room, or write it elsewhere; .pt takes any tensor"
        ) from None
    finally:
        part.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
