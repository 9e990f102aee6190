"""Exports the model of a run as a program that needs neither this project nor the network's code: `.pt2` or `.onnx`."""

from __future__ import annotations

import json
import os
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from runner.api.saved import SavedRun
from runner.config.errors import ConfigError, check
from runner.storage.manifest import SIGNATURE
from runner.system.import_path import is_installed

TOLERANCE = 1e-5
"""The largest accepted difference between an output of the program and the same output of the model.

It is relative to the model's largest absolute output or, if this output is below 1, absolute.
"""


def export_program(run: SavedRun, step: int, path: Path) -> None:
    """Export the model of the checkpoint of `step` to `path`, in the format given by the suffix.

    The program takes float32 inputs of shape [n, …], normalized as in the evaluation, where n is any batch size. A file
    at `path` is replaced only after the outputs of the program have been compared with those of the model.

    Raises:
        ConfigError: if a package is missing, the checkpoint is damaged, it does not say what the inputs are,
            the model cannot be exported, or the outputs of the program differ by more than `TOLERANCE`.
    """
    missing = [name for name in ("onnx", "onnxscript") if path.suffix == ".onnx" and not is_installed(name)]
    if missing:
        why = f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed"
        raise ConfigError("DESTINATION", str(path), why, "pip install onnx onnxscript, or name a .pt2 file")
    signature = run.signature(step)
    why = "its checkpoint does not say what the inputs are"
    check("inputs" in signature, "SOURCE", str(run.directory), why, "name a run of a classifier or a regression")
    model = run.model(step)
    inputs = torch.rand(3, *signature["inputs"], generator=torch.Generator().manual_seed(0))
    part = path.with_name(f".{os.getpid()}.part{path.suffix}")
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's exporters warn about their own internals
            wanted = model(inputs)
            outputs = PROGRAMS[path.suffix](model, inputs, json.dumps(signature), part)
        difference = float((outputs - wanted).abs().max() / wanted.abs().max().clamp(min=1))
        why = f"its outputs differ from those of the model by {difference:.2g}"
        check(difference <= TOLERANCE, "DESTINATION", str(path), why, "write the weights: .safetensors or .pt")
        os.replace(part, path)
    except ConfigError:
        raise
    except Exception as error:  # the exporters may raise any exception
        why = f"the model cannot be exported: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        raise ConfigError("DESTINATION", str(path), why, "write the weights: .safetensors or .pt") from error
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def _export_torch(model: torch.nn.Module, inputs: torch.Tensor, signature: str, path: Path) -> torch.Tensor:
    """Write a program of `torch.export` with `signature` to `path`, load it again, and return its outputs.

    https://docs.pytorch.org/docs/stable/export.html
    """
    program = torch.export.export(model, (inputs,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    torch.export.save(program, path, extra_files={SIGNATURE: signature})
    return torch.export.load(path).module()(inputs)


def _export_onnx(model: torch.nn.Module, inputs: torch.Tensor, signature: str, path: Path) -> torch.Tensor:
    """Write an ONNX model with `signature` to `path`, and return its outputs, computed by ONNX's reference evaluator.

    https://docs.pytorch.org/docs/stable/onnx.html
    """
    from onnx.reference import ReferenceEvaluator  # pyright: ignore[reportMissingImports]  # an extra

    options: Any = {"dynamic_shapes": ({0: torch.export.Dim("batch")},), "verbose": False}
    names: Any = {"input_names": ["inputs"], "output_names": ["outputs"]}
    program: Any = torch.onnx.export(model, (inputs,), dynamo=True, **options, **names)
    program.model.metadata_props[SIGNATURE] = signature
    program.save(path)
    outputs: Any = ReferenceEvaluator(str(path)).run(None, {"inputs": inputs.numpy()})
    return torch.from_numpy(outputs[0])


PROGRAMS = {".pt2": _export_torch, ".onnx": _export_onnx}
"""The suffixes of exported programs, for `torch.export` and ONNX."""
