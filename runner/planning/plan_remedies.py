"""Changes to the training of a run, each of which may make the run fit into the memory of its devices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

SMALLER_BATCHES = "batch normalization sees smaller batches"
"""The effect of a change with `divides_batches` on the results of a network with batch normalization."""

UNCHANGED = "the same up to rounding"


class Change(NamedTuple):
    """A change to the training of a run.

    Args:
        overrides: the overrides to add.
        costs: what the change costs, in words.
        results: the effect on the results, such as `16 bits`; empty if the results stay the same up to rounding. The
            effect of `divides_batches` is not included.
        divides_batches: whether each forward pass has fewer samples than before, which affects batch normalization.
    """

    overrides: tuple[str, ...]
    costs: str
    results: str = ""
    divides_batches: bool = False

    def effects(self, normalizes: bool) -> str:
        """Return what the change does to the results, in words.

        Args:
            normalizes: whether the network has batch normalization.
        """
        parts = [self.results, SMALLER_BATCHES if normalizes and self.divides_batches else ""]
        return "; ".join(filter(None, parts)) or UNCHANGED


_RECOMPUTED = "about a third more arithmetic"
_GATHERED = "parameters are sent twice per micro-batch"
_SMALLER = "smaller matrices"


def changes(num_devices: int) -> Iterator[Change]:
    """Yield the changes that may make a run fit into memory, the cheapest first.

    Args:
        num_devices: number of devices of the machine.
    """
    recomputed, several = "model.checkpoint_activations=true", num_devices > 1
    if several:
        yield Change(("parallel=ddp",), "gradients are sent once a step", divides_batches=True)
    for count in (2, 4, 8):
        yield Change((f"accumulation={count}",), _SMALLER, divides_batches=True)
    yield Change((recomputed,), _RECOMPUTED)
    if several:
        waits = "stages wait for each other at the start and the end of a step"
        yield Change(("parallel=fsdp",), _GATHERED, divides_batches=True)
        yield Change(("parallel=pipeline",), waits, divides_batches=True)
    yield Change(("precision=bf16",), "none where the device computes in bfloat16", "16 bits")
    yield Change((recomputed, "accumulation=8"), f"{_RECOMPUTED}; {_SMALLER}", divides_batches=True)
    if several:
        both, costs = ("parallel=fsdp", recomputed), f"{_GATHERED}; {_RECOMPUTED}"
        yield Change(both, costs, divides_batches=True)
        yield Change((*both, "accumulation=8"), f"{costs}; {_SMALLER}", divides_batches=True)
        yield Change((*both, "precision=bf16"), costs, "16 bits", divides_batches=True)
