"""The signature of a checkpoint, `model.json`: what the numbers in its inputs and outputs mean, and its data."""

from __future__ import annotations

import json
import math
import re
import reprlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from runner.config.errors import ABSENT, check
from runner.storage.manifest import SIGNATURE, saved_text, untrusted
from runner.storage.run_directory import LIMIT_BYTES

_LARGEST = 4096
"""The largest allowed size of a dimension. Without a limit, predictions with a forged file could use up the memory."""


_MOST_DIMS = 8
"""The largest number of dimensions of an input."""

_MOST_NAMES = 20
"""The number of names that a message shows."""


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


def check_same_names(saved: Mapping[str, Any], now: Mapping[str, Any], key: str = "data") -> None:
    """Check that data means to the model of a checkpoint what its training data meant.

    Args:
        saved: the signature of the checkpoint.
        now: the signature with the data of this session. The names of the classes, the targets and the columns are
            compared, in order, where both have them.
        key: the key of the error.

    Raises:
        ConfigError: if anything differs; it has both lists of names.
    """
    for kind in ("classes", "targets", "columns"):
        there, here = saved.get(kind), now.get(kind)
        if there and here is not None:
            trained, has = _listed(there, here), _listed(here, there)
            why = f"the model was trained with the {kind} {trained}, and this data has {has}"
            check(list(here) == list(there), key, ABSENT, why, f"use data with the same {kind}, or start a new run")


def check_same_samples(saved: Mapping[str, Any], now: Mapping[str, Any], accept: bool) -> str:
    """Check that a session has the samples of the checkpoint that it resumes.

    Args:
        saved: the entry `data` of the checkpoint's signature (see `Workload.samples_identity`).
        now: the same of this session.
        accept: whether other samples are accepted.

    Returns:
        What has changed, in words; empty if nothing has, or one of the arguments is empty.

    Raises:
        ConfigError: if anything differs, and `accept` is false.
    """
    if not saved or not now or saved == now:
        return ""
    counts = [f"{each['training']:,} training and {each['held_out']:,} held-out samples" for each in (saved, now)]
    other = f"{counts[0]} then, {counts[1]} now"
    other += ", with other content" if counts[0] == counts[1] else ""
    why = f"these are not the samples of the checkpoint ({other})"
    remedy = "restore them, or data.changed=accept to continue with these and the checkpoint's normalization"
    check(accept, "data", ABSENT, why, remedy)
    return other


def _listed(names: Sequence[str], others: Collection[str]) -> str:
    """Return the names as text; of a long list, those that the other list lacks, and the number of the rest."""
    known = set(others)
    shown = names if len(names) <= _MOST_NAMES else [name for name in names if name not in known][:_MOST_NAMES]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more:,} more" if shown else f"{more:,} in another order") * bool(more)


def _is_signature(value: Any) -> bool:
    if not isinstance(value, dict) or not value:
        return False
    value = dict(value)
    if not _is_identity(value.pop("data", None)):
        return False
    if not value:
        return True
    inputs, classes, image = (value.get(key) for key in ("inputs", "classes", "image"))
    if not isinstance(inputs, list) or len(inputs) > _MOST_DIMS:
        return False
    if not all(_is_number(size, 1, _LARGEST) and type(size) is int for size in inputs):
        return False
    if "targets" in value:
        columns = value.pop("columns", None)
        fits = columns is None or (_are_names(columns) and [len(columns)] == inputs)
        known = fits and value.keys() == {"inputs", "targets", "scale"}
        return known and _is_scale(value["scale"], value["targets"], inputs)
    return _are_names(classes) and (image is None or (isinstance(image, dict) and _is_image(image, inputs)))


def _is_identity(value: Any) -> bool:
    if not isinstance(value, dict):
        return value is None
    counts = all(type(value.get(key)) is int and 0 <= value[key] < 2**63 for key in ("training", "held_out"))
    known = value.keys() == {"training", "held_out", "sha256"}
    return counts and known and bool(re.fullmatch("[0-9a-f]{64}|", str(value["sha256"])))


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
    return lists and all(_is_number(x, -1e39, 1e39) for x in mean) and all(_is_number(x, 5e-324, 1e39) for x in std)


def _is_image(image: dict[str, Any], inputs: Any) -> bool:
    mean, std = image.get("mean"), image.get("std")
    if not (isinstance(mean, list) and isinstance(std, list)):
        return False
    known = image.keys() == {"shape", "mean", "std", "center"} and image["shape"] == inputs and len(inputs) == 3
    if not known or inputs[0] not in (1, 3) or inputs[1] != inputs[2] or not _is_number(image["center"], 1e-6, 1):
        return False
    return (
        len(mean) == len(std) == inputs[0]
        and all(_is_number(x, 0, 1) for x in mean)
        and all(_is_number(x, 1e-9, 1) for x in std)
    )


def _is_number(value: Any, least: float, most: float) -> bool:
    return type(value) in (int, float) and least <= value <= most
