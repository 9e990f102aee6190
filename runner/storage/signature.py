"""The signature of a checkpoint, `model.json`: what its inputs and outputs mean, its data, and its stages."""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Mapping
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any

from runner.config.errors import ABSENT, ConfigError, check
from runner.storage.checkpoint import SIGNATURE
from runner.storage.files import json_text
from runner.storage.manifest import DamagedError, saved_text, untrusted
from runner.storage.run_directory import MAX_BYTES, newest_step, step_name
from runner.storage.saved_run import named_checkpoint
from runner.storage.value_checks import COUNT, UnexpectedContentError, check_known, check_like

_SIZE = range(1, 4097)
"""The allowed sizes of a dimension. Without a limit, predictions with a forged file could use up the memory."""
OUTPUTS = range(1, 10**6 + 1)
"""The allowed numbers of classes of data without names of classes."""
_MAX_DIMS = 8
"""The largest number of dimensions of an input."""
_MAX_NAMES = 20
"""The number of names that a message shows."""

_MOMENTS = {"mean": [float], "std": [float]}
_FORMS: dict[str, Any] = {
    "inputs": [_SIZE],
    "classes": [str],
    "targets": [str],
    "outputs": OUTPUTS,
    "columns": [str],
    "scale": {str: _MOMENTS},
    "image": {"shape": [int], **_MOMENTS, "center": float},
    "text": {"context": OUTPUTS, "vocabulary": OUTPUTS, "tokenizer": str},
    "data": {"training": COUNT, "held_out": COUNT, "sha256": str},
    "cuts": [str],
}
"""The forms of the entries of a signature (see `check_like`)."""


def signature_text(signature: Mapping[str, Any]) -> str:
    """Return a signature as JSON text; empty if the signature is empty or too large, as with a million classes."""
    text = json_text(signature) if signature else ""
    return text if len(text.encode()) <= MAX_BYTES else ""


def saved_signature(checkpoint: Path) -> dict[str, Any]:
    """Return the signature in a checkpoint (see `Workload.signature`); empty if the checkpoint was written without one.

    Raises:
        DamagedError, ConfigError, OSError: as in `verified_manifest`, or if it has other content than a run writes.
    """
    text = saved_text(checkpoint, SIGNATURE)
    if text is None:
        return {}
    try:
        signature = json.loads(text)
        _check(signature)
    except (ValueError, RecursionError) as error:
        raise untrusted(checkpoint, f"{SIGNATURE} cannot be read: {reprlib.repr(error)}") from None
    except UnexpectedContentError as error:
        raise untrusted(checkpoint, f"{SIGNATURE} has other content than a run writes: {error}") from None
    return signature


def signature_to_resume(directory: Path, resume: str) -> dict[str, Any]:
    """Return the signature of the checkpoint to resume from; empty if there is none.

    What cannot be read is taken as empty: when it is loaded, an error says why, or the previous checkpoint is taken.
    """
    with suppress(OSError, DamagedError, ConfigError):
        return saved_signature(checkpoint_to_resume(directory, resume))
    return {}


def checkpoint_to_resume(directory: Path, resume: str) -> Path:
    """Return the path of the checkpoint that `resume` names, or of the newest one in the run `directory`."""
    return named_checkpoint(resume) or directory / "checkpoints" / step_name(newest_step(directory))


def _check(signature: Any) -> None:
    check_like(signature, dict, "it")
    entries = {key: value for key, value in signature.items() if (key, value) != ("image", None)}
    check_known(entries, _FORMS, (), "it")
    inputs: list[int] = entries.get("inputs", [])
    classes, targets, image, scale = (entries.get(key) for key in ("classes", "targets", "image", "scale"))
    fits = entries.keys() <= {"data", "outputs", "text", "cuts"} or (
        "inputs" in entries and bool(classes) != bool(targets)
    )
    fits = fits and len(inputs) <= _MAX_DIMS
    fits = fits and (not targets or (scale is not None and {"targets"} <= scale.keys() <= {"targets", "inputs"}))
    fits = fits and ("columns" not in entries or [len(entries["columns"])] == inputs)
    if image is not None:
        fits = fits and len(inputs) == 3 and inputs[0] in (1, 3) and inputs[1] == inputs[2]
        fits = fits and image["shape"] == inputs and 0 < image["center"] <= 1
    lengths = {"targets": len(targets or ()), "inputs": math.prod(inputs), "image": inputs[0] if inputs else 0}
    for key, moments in {**(scale or {}), **({"image": image} if image else {})}.items():
        fits = fits and len(moments["mean"]) == len(moments["std"]) == lengths.get(key)  # one would be broadcast
        fits = fits and all(abs(x) < 1e39 for x in moments["mean"]) and all(0 < x < 1e39 for x in moments["std"])
    if not fits:
        raise UnexpectedContentError("its sizes do not fit each other")


def check_same_names(saved: Mapping[str, Any], now: Mapping[str, Any], key: str = "data") -> None:
    """Check that the names of classes, targets and columns are the same, in order, where both signatures have them.

    Raises:
        ConfigError: with `key` and both lists of names, if anything differs.
    """
    for kind in ("classes", "targets", "columns"):
        there, here = saved.get(kind), now.get(kind)
        if there and here is not None and list(here) != list(there):
            start = next(i for i, (one, other) in enumerate(zip_longest(there, here)) if one != other)
            start = start if len(there) > _MAX_NAMES else 0  # of a long list, what follows the first difference
            trained, has = (", ".join(names[start : start + _MAX_NAMES]) for names in (there, here))
            why = f"the model was trained with the {kind} {trained}, and this data has {has}"
            raise ConfigError(key, ABSENT, why, f"use data with the same {kind}, or start a new run")


def num_samples(count: int) -> str:
    """Return the number of samples in words; 0 is a stream, whose length is not known."""
    return f"{count:,}" if count else "a stream of"


def check_same_samples(saved: Mapping[str, Any], now: Mapping[str, Any], accept: bool) -> str:
    """Return in words how the samples of a session (see `Workload.samples_identity`) differ from a checkpoint's, or "".

    Raises:
        ConfigError: if anything differs, and `accept` is false.
    """
    if not saved or not now or saved == now:
        return ""
    numbers = [[num_samples(each[kind]) for kind in ("training", "held_out")] for each in (saved, now)]
    counts = [f"{training} training and {held_out} held-out samples" for training, held_out in numbers]
    other = f"{counts[0]} then, {counts[1]} now"
    other += ", with other content" if counts[0] == counts[1] else ""
    why = f"these are not the samples of the checkpoint ({other})"
    remedy = "restore them, or data.changed=accept to continue with these and the checkpoint's normalization"
    check(accept, "data", ABSENT, why, remedy)
    return other
