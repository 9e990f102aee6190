"""`python -m runner convert SOURCE DESTINATION` extracts the weights of a run, or converts a file of weights.

The format of the written weights does not depend on the parallel mode: `model.weights=DESTINATION` starts a run in any
mode from these weights, and other programs can load them. If the run averages its weights, these are the averages.
Reading SOURCE never executes code that is hidden in it, and the hashes of a checkpoint are verified before it is read.
If DESTINATION is a .pt2 or .onnx file, the model of a run is exported as a program instead. If the run was trained with
code of your own, this needs it: workload=mine.py, for example.
"""

from __future__ import annotations

import io
import json
import logging
import math
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save as safetensors_bytes
from torch.utils._pytree import tree_leaves

from runner.analysis.output import check_writable
from runner.api.saved import SavedRun, load
from runner.commands.arguments import Parser, command
from runner.config import user_code
from runner.config.errors import ABSENT, ConfigError, check
from runner.config.overrides import text_override
from runner.data.base import Collated, copied, shape_of
from runner.model.weights import read_weights
from runner.precision import Double
from runner.storage.checkpoint import SIGNATURE
from runner.storage.files import check_readable, write_bytes
from runner.storage.manifest import MANIFEST
from runner.storage.state_dict import header, renamed, with_versions
from runner.system.console import DONE
from runner.system.import_path import is_installed
from runner.system.trees import Tree, call, doubled, map_tensors, num_rows, tensors_of
from runner.tracking.log_file import quiet
from runner.workloads.samples import SampleWorkload

_WEIGHTS = (".safetensors", ".pt", ".pth")
_MAX_REASON = 1000  # characters of what an exporter says


@command
def main(arguments: Sequence[str] | None) -> int:
    parser = Parser("convert", __doc__, overrides=True, config_dir=False)
    parser.add_argument("source", metavar="SOURCE", help="a run directory, or a file of weights")
    formats = "weights: a .safetensors file, or a state dict as .pt or .pth; the model as a program: .pt2 or .onnx"
    parser.add_argument("destination", metavar="DESTINATION", help=formats)
    parser.add_checkpoint(None)  # the default is told from what is typed, which a file refuses
    prefix_help = "prefix names with module., as DataParallel does"
    parser.add_argument("--module-prefix", action="store_true", help=prefix_help)
    parser.add_argument("--force", action="store_true", help="replace DESTINATION if it exists")
    options = parser.parsed(arguments)
    source, destination, choice = options.source, options.destination, options.checkpoint
    path, file = Path(os.path.expanduser(destination)), Path(os.path.expanduser(source))
    check_writable("DESTINATION", destination)
    formats = (*_WEIGHTS, *PROGRAMS)
    why = f"its suffix must be one of {', '.join(formats)}"
    check(path.suffix in formats, "DESTINATION", destination, why, "name a file with one of them")
    in_checkpoint, elsewhere = (path.parent / MANIFEST).exists(), "write it elsewhere: a checkpoint must not change"
    check(not in_checkpoint, "DESTINATION", destination, "it is inside a checkpoint", elsewhere)
    check(options.force or not path.exists(), "DESTINATION", destination, "it already exists", "--force replaces it")
    is_program, words = path.suffix in PROGRAMS, options.overrides
    why = "weights are copied without the config, and only a run is exported"
    check(is_program or not words, " ".join(words), ABSENT, why, "leave it out, or name a .pt2 or .onnx file")
    check(not (is_program and options.module_prefix), "--module-prefix", True, "a program has no names", "leave it out")

    check_readable("SOURCE", file)
    why, remedy = "there is no such file or directory", "name a run directory, or a file of weights"
    check(file.exists(), "SOURCE", source, why, remedy)
    if file.is_dir():
        run = load(file)
        checkpoint = run.checkpoint(choice or "best")
        step = int(checkpoint.name.removeprefix("step_"))
        if is_program:
            _export_program(run, step, path, words)
            print(f"{path}: the model of {checkpoint}; its outputs were compared")
            return DONE
        tensors, signature, origin = run.weights(step), run.signature(step), f"{checkpoint}, after step {step}"
    else:
        check(choice is None, "--checkpoint", choice, f"{file} is not a run directory", "leave it out")
        check(not is_program, "SOURCE", source, "it is not a run", "name a run directory")
        try:
            tensors, signature, origin = read_weights(str(file)), {}, str(file)
        except ConfigError as error:
            raise ConfigError("SOURCE", error.got, error.why, error.remedy) from None
    prefix = "module." if options.module_prefix else ""
    _write(renamed(tensors, lambda name: prefix + name), path, signature)
    sizes = [each.numel() for each in tensors.values() if isinstance(each, torch.Tensor)]
    print(f"{path}: {len(sizes)} tensors, {sum(sizes):,} values, from {origin}")
    print(f"start from it: {text_override('model.weights', path)}")
    return DONE


def _write(tensors: dict[str, torch.Tensor], path: Path, signature: dict[str, Any]) -> None:
    """Write `tensors` by name to `path`, with the signature of the model, which a state dict has no place for."""
    # Contiguous copies: safetensors rejects tensors that share memory, and torch.save would write the whole storage.
    copies: dict[str, Any] = {
        name: each.detach().clone(memory_format=torch.contiguous_format) if isinstance(each, torch.Tensor) else each
        for name, each in tensors.items()
    }
    if path.suffix == ".safetensors":
        others = [name for name, each in copies.items() if not isinstance(each, torch.Tensor)]
        copies = {name: each for name, each in copies.items() if name not in others}
        if others:
            print(f"left out, as only .pt holds what is no tensor: {', '.join(others)}")
    copies = with_versions(copies, tensors)
    try:
        if path.suffix == ".safetensors":
            facts = header(copies) | ({SIGNATURE: json.dumps(signature)} if signature else {})
            content = safetensors_bytes(copies, facts or None)
        else:
            torch.save(copies, buffer := io.BytesIO())
            content = buffer.getvalue()
        write_bytes(path, content)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        why = f"it cannot be written: {str(error).splitlines()[0]}"
        remedy = "make room, or write it elsewhere; .pt takes any tensor"
        raise ConfigError("DESTINATION", str(path), why, remedy) from None


# ---------------------------------------------------------------------------------------------------------------------
# Programs: they need neither this project nor the network's code

_TOLERANCE = 1e-5
"""The largest accepted difference between outputs of program and model, relative to the largest output if above 1."""


def _export_program(run: SavedRun, step: int, path: Path, overrides: Sequence[str]) -> None:
    """Export the model of a checkpoint as a program for inputs of shape [n, …], normalized as in evaluation.

    The inputs are float32; those of a user's data set are as in its first samples.
    """
    can_export = path.suffix != ".onnx" or (is_installed("onnx") and is_installed("onnxscript"))
    why, remedy = "onnx and onnxscript are not both installed", "pip install onnx onnxscript, or name a .pt2 file"
    check(can_export, "DESTINATION", str(path), why, remedy)
    signature, saved = run.signature(step), run.on_one_device(step, overrides)
    user_code.check_given(saved.code, str(run.directory), "SOURCE")
    if "inputs" in signature:
        inputs: Tree = torch.rand(3, *signature["inputs"], generator=torch.Generator().manual_seed(0))
        batches = [inputs, inputs[:1]]  # a program may be for batches of one size
    else:
        workload = saved.workload
        why, remedy = "its checkpoint does not say what the inputs are", "name a run of supervised learning"
        if not isinstance(workload, SampleWorkload):
            raise ConfigError("SOURCE", str(run.directory), why, remedy)
        workload.prepare()
        found = [next(workload.train.in_order(count, (0, 1), torch.device("cpu"))) for count in (3, 1)]
        why = "a step says what the network is called with, and not its data"
        is_called = not isinstance(found[0], Collated)
        check(is_called, "DESTINATION", str(path), why, ".safetensors or .pt: the weights")
        batches = [each.inputs for each in found]
        workload.close()
        signature["inputs"] = shape_of(batches[0])
    remedy = "write the weights: .safetensors or .pt"
    if path.suffix == ".onnx" and not is_installed("onnxruntime"):
        remedy += "; with onnxruntime (pip install), that computes the outputs, not ONNX's reference evaluator"
    model = run.model(step, overrides)
    if isinstance(saved.precision, Double):
        batches = doubled(batches)
    part = path.with_name(f".{os.getpid()}.part{path.suffix}")
    try:
        with torch.no_grad(), _quiet():
            # Each gets a copy, which it may change in place.
            program = PROGRAMS[path.suffix](model, copied(batches[0]), json.dumps(signature), part)
            for batch in batches:
                difference = _difference(call(program, copied(batch)), call(model, copied(batch)))
                why = f"its outputs differ from those of the model by {difference:.2g}, for {num_rows(batch)} samples"
                check(difference <= _TOLERANCE, "DESTINATION", str(path), why, remedy)
        os.replace(part, path)
    except ConfigError:
        raise
    except Exception as error:  # the exporters may raise any exception
        why = f"the model cannot be exported: {_reason(error)}"
        raise ConfigError("DESTINATION", str(path), why, remedy) from error
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def _difference(outputs: Any, wanted: Any) -> float:
    """Return the largest difference of an element, relative to the largest one of its tensor, if that is above 1."""
    differences = [torch.zeros((), dtype=torch.float64)]
    for one, other in zip(tree_leaves(outputs), tree_leaves(wanted), strict=True):
        if one.shape != other.shape:
            return math.inf
        wide = torch.complex128 if other.is_complex() else torch.float64
        one, other = one.to(wide), other.to(wide)
        distance = torch.where(one == other, 0.0, (one - other).abs())  # infinities may be equal
        differences.append((distance / other.abs().max().clamp(min=1)).max())
    return float(torch.stack(differences).max())  # NaN if there is one


def _reason(error: BaseException) -> str:
    """Return the type and the message of `error`, without blank lines and advice about torch's logs."""
    text = re.split("The error above occurred when|For more debugging help", str(error))[0]
    lines = [line.strip() for line in text.splitlines()]
    said = [line for line in lines if line and not re.search("TORCH_LOGS|TORCHDYNAMO|For more information", line)]
    return f"{type(error).__name__}: {' '.join(said)}"[:_MAX_REASON]


@contextmanager
def _quiet() -> Iterator[None]:
    """A context without what torch's exporters print, also about an export that fails and is tried in another way."""
    with quiet(logging.ERROR), warnings.catch_warnings(action="ignore"):
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            yield


def _exported(model: torch.nn.Module, inputs: Tree) -> torch.export.ExportedProgram:
    """Return a program for batches of any size. If calling `model` does not show one, its Python code is traced.

    Where the user's `collate` pads samples, the program is for any length, if it can be.
    """
    batch, other = torch.export.Dim("batch"), torch.export.Dim.AUTO
    others = slice(1, None) if user_code.find("collate") is not None else slice(0)
    sizes = map_tensors(lambda each: {0: batch} | dict.fromkeys(range(each.dim())[others], other), inputs)
    arguments: Any = {"args": (), "kwargs": inputs, "dynamic_shapes": sizes}
    if not isinstance(inputs, Mapping):
        several = isinstance(inputs, tuple | list)
        arguments = {"args": tuple(inputs) if several else (inputs,)}
        arguments["dynamic_shapes"] = tuple(sizes) if several else (sizes,)
    try:
        return torch.export.export(model, **arguments)
    except Exception:
        with suppress(Exception):
            return torch.export.export(model, strict=True, **arguments)  # such as of `len(inputs)`
        raise


def _export_torch(model: torch.nn.Module, inputs: Tree, signature: str, path: Path) -> Callable[..., Any]:
    """Write a program of `torch.export` with `signature` to `path`, and return what is loaded from it.

    https://docs.pytorch.org/docs/stable/export.html
    """
    torch.export.save(_exported(model, inputs), path, extra_files={SIGNATURE: signature})
    return torch.export.load(path).module()


def _export_onnx(model: torch.nn.Module, inputs: Tree, signature: str, path: Path) -> Callable[..., Any]:
    """Write an ONNX model with `signature` to `path`, and return a function that computes its outputs.

    Several inputs have the names that the network gives them.

    ONNX Runtime does if it is installed, otherwise ONNX's reference evaluator, which differs from it in some operators,
    such as pooling with `ceil_mode`. https://docs.pytorch.org/docs/stable/onnx.html
    """
    names: Any = {"input_names": ["inputs"]} if isinstance(inputs, torch.Tensor) else {}
    options: Any = {"output_names": ["outputs"], "verbose": False, "dynamo": True} | names
    program: Any = torch.onnx.export(_exported(model, inputs), **options)
    program.model.metadata_props[SIGNATURE] = signature
    program.save(path)
    if is_installed("onnxruntime"):
        from onnxruntime import InferenceSession  # pyright: ignore[reportMissingImports]  # an extra

        evaluator = InferenceSession(str(path), providers=["CPUExecutionProvider"])
    else:
        from onnx.reference import ReferenceEvaluator  # pyright: ignore[reportMissingImports]  # an extra

        evaluator = ReferenceEvaluator(str(path))

    def outputs(*several: Any, **named: Any) -> list[torch.Tensor]:
        arrays = [each.numpy() for each in tensors_of((several, named))]
        found: Any = evaluator.run(
            None, dict(zip([each.name for each in program.model.graph.inputs], arrays, strict=True))
        )
        return [torch.from_numpy(each) for each in found]

    return outputs


PROGRAMS: dict[str, Callable[[torch.nn.Module, Tree, str, Path], Callable[..., Any]]] = {
    ".pt2": _export_torch,
    ".onnx": _export_onnx,
}
"""The suffixes of exported programs, for `torch.export` and ONNX."""
