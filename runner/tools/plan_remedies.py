"""Changes of how a run is trained that make it fit into the memory of its devices, the cheapest first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class Change(NamedTuple):
    """A change of how a run is trained.

    Args:
        overrides: the overrides to add.
        costs: what it costs, in words.
        results: what it does to the results: `the same up to rounding`, or `16 bits`.
    """

    overrides: tuple[str, ...]
    costs: str
    results: str


_SAME, _HALF = "the same up to rounding", "16 bits"
_ACCUMULATION = "smaller matrices; batch normalization sees smaller batches"
_RECOMPUTED = "about a third more arithmetic"
_GATHERED = "parameters are sent twice a step"


def changes(num_devices: int) -> Iterator[Change]:
    """Yield changes, the cheapest first.

    Args:
        num_devices: number of devices of the machine.
    """
    recomputed = "model.checkpoint_activations=true"
    if num_devices > 1:
        yield Change(("parallel=ddp",), "gradients are sent once a step", _SAME)
    for count in (2, 4, 8):
        yield Change((f"accumulation={count}",), _ACCUMULATION, _SAME)
    yield Change((recomputed,), _RECOMPUTED, _SAME)
    if num_devices > 1:
        yield Change(("parallel=fsdp",), _GATHERED, _SAME)
        yield Change(("parallel=pipeline",), "stages wait for each other at the start and the end of a step", _SAME)
    yield Change(("precision=bf16",), "none where the device computes in bfloat16", _HALF)
    yield Change((recomputed, "accumulation=8"), f"{_RECOMPUTED}; {_ACCUMULATION}", _SAME)
    if num_devices > 1:
        yield Change(("parallel=fsdp", recomputed), f"{_GATHERED}; {_RECOMPUTED}", _SAME)
        yield Change(("parallel=fsdp", recomputed, "accumulation=8"), f"{_GATHERED}; {_RECOMPUTED}", _SAME)
        yield Change(("parallel=fsdp", recomputed, "precision=bf16"), f"{_GATHERED}; {_RECOMPUTED}", _HALF)
