"""`python -m runner convert SOURCE DESTINATION` extracts the weights of a run, or converts a file of weights.

The format of the written weights does not depend on the parallel mode: `model.weights=DESTINATION` starts a run in any
mode from these weights, and other programs can load them. If the run averages its weights, these are the averages.
Reading SOURCE never executes code that is hidden in it, and the hashes of a checkpoint are verified before it is read.
If DESTINATION is a .pt2 or .onnx file, the model of a run is exported as a program instead.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save as safetensors_bytes

from runner.analysis.output import check_writable
from runner.api.saved import load
from runner.commands.arguments import Parser, command
from runner.commands.export_program import PROGRAMS, export_program
from runner.config.errors import ConfigError, check
from runner.config.overrides import text_override
from runner.model.weights import read_weights
from runner.storage.files import check_readable, write_bytes
from runner.storage.manifest import NAME as MANIFEST
from runner.storage.manifest import SIGNATURE
from runner.system.console import DONE

_WEIGHTS = (".safetensors", ".pt", ".pth")


@command
def main(arguments: Sequence[str] | None) -> int:
    """Write the file that the command line names, and print what it has."""
    parser = Parser("convert", __doc__)
    parser.add_argument("source", metavar="SOURCE", help="a run directory, or a file of weights")
    formats = "weights: a .safetensors file, or a state dict as .pt or .pth; the model as a program: .pt2 or .onnx"
    parser.add_argument("destination", metavar="DESTINATION", help=formats)
    parser.add_checkpoint(None)  # the default is told from what is typed, which a file refuses
    prefix_help = "prefix names with module., as DataParallel does"
    parser.add_argument("--module-prefix", action="store_true", help=prefix_help)
    parser.add_argument("--force", action="store_true", help="replace DESTINATION if it exists")
    options = parser.parsed(arguments)
    print(_convert(options.source, options.destination, options.checkpoint, options.module_prefix, options.force))
    return DONE


def _convert(source: str, destination: str, choice: str | None, with_prefix: bool, force: bool) -> str:
    """Write the file `destination`, and return what to print about it."""
    path, file = Path(os.path.expanduser(destination)), Path(os.path.expanduser(source))
    check_writable("DESTINATION", destination)
    formats = (*_WEIGHTS, *PROGRAMS)
    why = f"its suffix must be one of {', '.join(formats)}"
    check(path.suffix in formats, "DESTINATION", destination, why, "name a file with one of them")
    in_checkpoint, elsewhere = (path.parent / MANIFEST).exists(), "write it elsewhere: a checkpoint must not change"
    check(not in_checkpoint, "DESTINATION", destination, "it is inside a checkpoint", elsewhere)
    check(force or not path.exists(), "DESTINATION", destination, "it already exists", "--force replaces it")
    is_program = path.suffix in PROGRAMS
    check(not (is_program and with_prefix), "--module-prefix", True, "a program has no names", "leave it out")

    check_readable("SOURCE", file)
    why, remedy = "there is no such file or directory", "name a run directory, or a file of weights"
    check(file.exists(), "SOURCE", source, why, remedy)
    if file.is_dir():
        run = load(file)
        checkpoint = run.checkpoint(choice or "best")
        step = int(checkpoint.name.removeprefix("step_"))
        if is_program:
            export_program(run, step, path)
            return f"{path}: the model of {checkpoint}; its outputs were compared"
        tensors, signature, origin = run.weights(step), run.signature(step), f"{checkpoint}, after step {step}"
    else:
        check(choice is None, "--checkpoint", choice, f"{file} is not a run directory", "leave it out")
        check(not is_program, "SOURCE", source, "it is not a run", "name a run directory")
        tensors, signature, origin = _tensors_in(file), {}, str(file)
    prefix = "module." if with_prefix else ""
    _write({prefix + name: tensor for name, tensor in tensors.items()}, path, signature)
    values = sum(tensor.numel() for tensor in tensors.values())
    return (
        f"{path}: {len(tensors)} tensors, {values:,} values, from {origin}\n"
        f"start from it: {text_override('model.weights', path)}"
    )


def _tensors_in(file: Path) -> dict[str, torch.Tensor]:
    try:
        return read_weights(str(file))
    except ConfigError as error:
        raise ConfigError("SOURCE", error.got, error.why, error.remedy) from None


def _write(tensors: dict[str, torch.Tensor], path: Path, signature: dict[str, Any]) -> None:
    """Write `tensors` by name to `path`, with the signature of the model, which a state dict has no place for."""
    # Contiguous copies: safetensors rejects tensors that share memory, and torch.save would write the whole storage.
    copies = {name: t.detach().clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}
    try:
        if path.suffix == ".safetensors":
            content = safetensors_bytes(copies, {SIGNATURE: json.dumps(signature)} if signature else None)
        else:
            torch.save(copies, buffer := io.BytesIO())
            content = buffer.getvalue()
        write_bytes(path, content)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        why = f"it cannot be written: {str(error).splitlines()[0]}"
        remedy = "make room, or write it elsewhere; .pt takes any tensor"
        raise ConfigError("DESTINATION", str(path), why, remedy) from None
