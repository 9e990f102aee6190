"""Hashes of the samples in batches of any format."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch


def sample_hashes(batch: Any, count: int) -> list[str]:
    """Return a hash of each sample in a batch, computed from all bits of the sample's row in every tensor.

    Args:
        batch: tensors, nested in tuples, lists, mappings and objects. Tensors without a row per sample are ignored.
        count: the number of samples in the batch.

    Returns:
        A list of `count` hashes; an empty list if no tensor has a row per sample.
    """
    hashes = [hashlib.sha256() for _ in range(count)]
    found = False
    for tensor in tensors_of(batch):
        if tensor.dim() == 0 or len(tensor) != count or tensor.layout != torch.strided:
            continue
        found = True
        rows = tensor.detach().cpu().reshape(count, tensor.numel() // count).contiguous().view(torch.uint8).numpy()
        for digest, row in zip(hashes, rows, strict=True):
            digest.update(f"{tensor.dtype} {tuple(tensor.shape[1:])} ".encode())
            digest.update(row.tobytes())
    return [digest.hexdigest() for digest in hashes] if found else []


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested tuples, lists, mappings and objects; the order depends only on the structure."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from tensors_of(value[key])
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for part in value:
            yield from tensors_of(part)
    elif hasattr(value, "__dict__"):
        yield from tensors_of(vars(value))


def first_other_samples(tested: list[list[str]], reference: list[list[str]]) -> str:
    """Return a description of the first step whose samples differ from the reference; empty if there is no such step.

    Args:
        tested: the hashes of the samples of each step of the tested run.
        reference: the hashes of the samples of each step of the reference.
    """
    for step, (ours, theirs) in enumerate(zip(tested, reference, strict=True), start=1):
        missing, added = Counter(theirs) - Counter(ours), Counter(ours) - Counter(theirs)
        if missing or added:
            return f"step {step}: {missing.total()} of {len(theirs)} missing, {added.total()} others or repeated"
    return ""
