"""Changes to the training of a run, each of which may make the run fit into the memory of its devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from runner.config.errors import ConfigError
from runner.planning.fake_step import trace
from runner.planning.planned_session import prepared
from runner.run import Run

_RECOMPUTED, _GATHERED = "about a third more arithmetic", "parameters are sent twice per micro-batch"
_SMALLER = "smaller matrices"
_CHECKPOINTED = "model.checkpoint_activations=true"

CHANGES = {
    ("parallel=ddp",): "gradients are sent once a step",
    ("accumulation=2",): _SMALLER,
    ("accumulation=4",): _SMALLER,
    ("accumulation=8",): _SMALLER,
    (_CHECKPOINTED,): _RECOMPUTED,
    ("parallel=fsdp",): _GATHERED,
    ("parallel=pipeline",): "stages wait for each other at the start and the end of a step",
    ("precision=bf16",): "none where the device computes in bfloat16",
    (_CHECKPOINTED, "accumulation=8"): f"{_RECOMPUTED}; {_SMALLER}",
    ("parallel=fsdp", _CHECKPOINTED): f"{_GATHERED}; {_RECOMPUTED}",
    ("parallel=fsdp", _CHECKPOINTED, "accumulation=8"): f"{_GATHERED}; {_RECOMPUTED}; {_SMALLER}",
    ("parallel=fsdp", _CHECKPOINTED, "precision=bf16"): f"{_GATHERED}; {_RECOMPUTED}",
}
"""What each change costs, by the overrides to add; the cheapest first."""

_ENOUGH = 4
"""As soon as this many changes make the run fit, no more changes are tried."""


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
        A dict for each change that was tried: `overrides`, `costs`, what it does to the `results`, `peak_bytes`, the
        memory of the rank that needs most, and whether the run `fits`. Changes that are refused, or that the config
        contains already, are left out.
    """
    found: list[dict[str, Any]] = []
    for overrides, costs in CHANGES.items():
        changed = build(overrides) if num_devices > 1 or not overrides[0].startswith("parallel=") else None
        if changed is None or changed.config == run.config:
            continue
        try:
            ranks = trace(changed, prepared(changed, num_devices))
        except ConfigError:
            continue
        divides_batches = any(word.startswith(("parallel=", "accumulation=")) for word in overrides)
        smaller = "batch normalization sees smaller batches" if divides_batches and ranks[0].normalizes else ""
        rounded = "16 bits" if "precision=bf16" in overrides else ""
        results = "; ".join(filter(None, (rounded, smaller))) or "the same up to rounding"
        peak = max(rank.peak_bytes for rank in ranks)
        change = {"overrides": list(overrides), "costs": costs, "results": results}
        found.append(change | {"peak_bytes": peak, "fits": peak <= memory})
        if sum(each["fits"] for each in found) == _ENOUGH:
            break
    return found
