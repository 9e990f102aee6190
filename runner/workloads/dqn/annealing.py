"""The probability of a random action, which falls linearly with the steps of the environment."""

from __future__ import annotations

import logging
import math

from runner.storage.value_checks import UnexpectedContentError, check_like

log = logging.getLogger(__name__)


class Annealing:
    """Linear annealing from `start` to `final` over `fraction` of `env_steps`, which are those of all processes.

    A run that is resumed with other `env_steps` goes on as it began, unless another fraction is asked for.
    """

    def __init__(self, start: float, final: float, fraction: float, env_steps: int):
        self._start, self._final, self._fraction = start, final, fraction
        self._length = fraction * env_steps

    def value(self, env_steps: int) -> float:
        """Return the probability after `env_steps` steps of all processes."""
        progress = min(1.0, env_steps / max(self._length, 1))
        return self._start + (self._final - self._start) * progress

    def state(self) -> dict[str, float]:
        return {"epsilon_fraction": self._fraction, "annealing_steps": self._length}

    def load(self, state: dict[str, float]) -> None:
        """Restore a state; raises `UnexpectedContentError` if it is something else."""
        if not state:  # of an older checkpoint
            return
        check_like(state, {"epsilon_fraction": float, "annealing_steps": float}, "the annealing of epsilon")
        before, now = state["annealing_steps"], self._length
        if not 0 <= before < math.inf:
            raise UnexpectedContentError(f"epsilon cannot be annealed over {before} steps")
        if state["epsilon_fraction"] != self._fraction:
            text = "epsilon is annealed over %g environment steps instead of %g, from the beginning of the run"
            log.info(text, now, before)
        elif before != now:
            text = "epsilon is still annealed over the first %g environment steps, though env_steps has changed: "
            log.info(text + "another workload.epsilon_fraction anneals it over its fraction of them", before)
            self._length = before
