"""Changes to the training of a run, each of which may make the run fit into the memory of its devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from runner.config.errors import ConfigError
from runner.planning.fake_step import trace
from runner.planning.planned_session import prepared
from runner.run import Run

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


_ENOUGH = 4
"""As soon as this many changes make the run fit, no more changes are tried."""

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


def remedies(
    run: Run, build: Callable[[Sequence[str]], Run | None], num_devices: int, memory: float
) -> list[dict[str, Any]]:
    """Try changes of how the run is trained, the cheapest first, until four have been found that make it fit.

    Args:
        run: the run that does not fit.
        build: function that returns the run with a change, given its overrides; None if it is refused.
        num_devices: number of devices of the machine.
        memory: memory of each device in bytes.

    Returns:
        A list with a dict for each change that was tried. Changes that are refused or that the config contains already
        are left out. Each dict has the fields of a `Change` as keys, where `results` is the text that `Change.effects`
        returns, and two more keys: `peak_bytes`, the memory of the rank that needs most, and whether the run `fits`.
    """
    found: list[dict[str, Any]] = []
    for change in changes(num_devices):
        changed = build(change.overrides)
        if changed is None or changed.config == run.config:
            continue
        try:
            ranks = trace(changed, prepared(changed, num_devices))
        except ConfigError:
            continue
        peak = max(rank.peak_bytes for rank in ranks)
        results = change.effects(ranks[0].normalizes)
        found.append(change._asdict() | {"results": results, "peak_bytes": peak, "fits": peak <= memory})
        if sum(each["fits"] for each in found) == _ENOUGH:
            break
    return found
