"""The phases of a training step: in each, a part of the parameters is trained, with a loss of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Phase(NamedTuple):
    """A part of a training step that ends with an update; most workloads have one, in which all is trained.

    Args:
        name: the name of its curves; empty if it is the only one.
        every: number of steps from one to the next; the first is in step `every`.
        parameters: the names of the parameters that it trains; None for all.
    """

    name: str = ""
    every: int = 1
    parameters: frozenset[str] | None = None

    def prefixed(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return the names of its metrics among those of all phases, such as `generator/loss`."""
        return tuple(f"{self.name}/{name}" if self.name else name for name in names)
