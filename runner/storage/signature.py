"""The signature of a checkpoint, `model.json`: the inputs of its model, and the names of the classes or targets."""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runner.storage.manifest import SIGNATURE, saved_text, untrusted
from runner.storage.run_directory import LIMIT_BYTES

_LARGEST = 4096
"""The largest allowed size of a dimension. Without a limit, predictions with a forged file could use up the memory."""


_MOST_DIMS = 8
"""The largest number of dimensions of an input."""


def signature_text(signature: Mapping[str, Any]) -> str:
    """Return a signature as JSON text; empty if the signature is empty or too large, as with a million classes."""
    text = json.dumps(signature, ensure_ascii=False, indent=2) + "\n" if signature else ""
    return text if len(text.encode()) <= LIMIT_BYTES else ""


def saved_signature(checkpoint: Path) -> dict[str, Any]:
    """Return the signature in a checkpoint (see `Workload.signature`); empty if the checkpoint was written without one.

    Raises:
        DamagedError: if the manifest is missing or damaged, or if it lists a `model.json` that is missing or damaged.
        ConfigError: if one of these files is unsafe to read, has invalid content, or was written by an incompatible
            version of this project.
        OSError: if one of these files cannot be read for another reason.
    """
    text = saved_text(checkpoint, SIGNATURE)
    if text is None:
        return {}
    try:
        signature = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise untrusted(checkpoint, f"{SIGNATURE} cannot be read: {reprlib.repr(error)}") from None
    if not _is_signature(signature):
        raise untrusted(checkpoint, f"{SIGNATURE} has other content than a run writes")
    return signature


def _is_signature(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    inputs, classes, image = (value.get(key) for key in ("inputs", "classes", "image"))
    if not isinstance(inputs, list) or len(inputs) > _MOST_DIMS:
        return False
    if not all(_is_number(size, 1, _LARGEST) and type(size) is int for size in inputs):
        return False
    if "targets" in value:
        return value.keys() == {"inputs", "targets", "scale"} and _is_scale(value["scale"], value["targets"], inputs)
    return _are_names(classes) and (image is None or (isinstance(image, dict) and _is_image(image, inputs)))


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(name, str) for name in value)


def _is_scale(scale: Any, targets: Any, inputs: Any) -> bool:
    """Return whether `scale` has the means and standard deviations of all targets and, optionally, of all inputs."""
    if not _are_names(targets) or not isinstance(scale, dict):
        return False
    lengths = {"targets": len(targets), "inputs": math.prod(inputs)}
    if "targets" not in scale or not scale.keys() <= lengths.keys():
        return False
    return all(_are_moments(scale[key], lengths[key]) for key in scale)


def _are_moments(value: Any, length: int) -> bool:
    if not isinstance(value, dict) or value.keys() != {"mean", "std"}:
        return False
    mean, std = value["mean"], value["std"]
    lists = isinstance(mean, list) and isinstance(std, list) and len(mean) == len(std) == length
    return lists and all(_is_number(x, -1e38, 1e38) for x in mean) and all(_is_number(x, 1e-38, 1e38) for x in std)


def _is_image(image: dict[str, Any], inputs: Any) -> bool:
    mean, std = image.get("mean"), image.get("std")
    if not (isinstance(mean, list) and isinstance(std, list)):
        return False
    known = image.keys() == {"shape", "mean", "std", "centre"} and image["shape"] == inputs and len(inputs) == 3
    if not known or inputs[0] not in (1, 3) or inputs[1] != inputs[2] or not _is_number(image["centre"], 1e-6, 1):
        return False
    return (
        len(mean) == len(std) == inputs[0]
        and all(_is_number(x, 0, 1) for x in mean)
        and all(_is_number(x, 1e-9, 1) for x in std)
    )


def _is_number(value: Any, least: float, most: float) -> bool:
    return type(value) in (int, float) and least <= value <= most
