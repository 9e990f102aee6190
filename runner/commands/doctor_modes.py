"""Measures how fast the parallel modes train on this machine, for `runner doctor --measure`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from runner.commands.composed_run import compose_run
from runner.config.errors import ConfigError
from runner.planning.choice import measured_modes
from runner.planning.trial import TrialError
from runner.run import Run

BUDGET_SECONDS = 60.0
"""Seconds that the measurement of all modes may take, for each network."""

SMALL = ("workload=classifier",)
LARGE = {
    "cpu": ("model=resnet18", "data=synthetic", "data.size=32", "data.num_samples=256", "batch_size=32"),
    "cuda": ("workload=resnet50",),
}
"""For each kind of device, the overrides of a network large enough to keep the device busy in each step."""


def speed_of_modes(names: Sequence[str], kind: str, budget: float = BUDGET_SECONDS) -> dict[str, Any]:
    """Measure how fast a small and a larger network train in each of the parallel modes `names`.

    Modes that cannot be faster than a single device are left out.

    Args:
        names: the parallel modes, as options of `parallel=`.
        kind: the kind of device that `device=auto` chooses: `cpu`, `cuda` or `mps`.
        budget: the time in seconds that all modes together may take for one network.

    Returns:
        A dict with the keys `small network` and `larger network`. Each value is the dict that `measured_modes` returns,
        or a text that says why the network could not be trained.
    """
    found: dict[str, Any] = {}
    for network, overrides in {"small network": SMALL, "larger network": LARGE.get(kind, LARGE["cpu"])}.items():

        def compose(more: Sequence[str], overrides: Sequence[str] = overrides) -> Run:
            return compose_run([*overrides, *more], name="doctor")

        try:
            modes = [name for name in names if compose((f"parallel={name}",)).parallel.may_be_faster]
            found[network] = measured_modes(compose, modes, budget, lambda line: print(line, file=sys.stderr))
        except (ConfigError, TrialError) as error:
            found[network] = " ".join(str(error).split())
    return found
