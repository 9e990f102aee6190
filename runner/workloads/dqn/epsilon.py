"""The probability ε of a random action in ε-greedy exploration, which decreases linearly during training."""

from __future__ import annotations


def epsilon(env_steps: int, start: float, final: float, decay_steps: float) -> float:
    """Return the probability of a random action.

    Args:
        env_steps: number of environment steps that have been taken, summed over all processes.
        start: the probability before the first step.
        final: the probability after `decay_steps` steps.
        decay_steps: number of environment steps during which the probability changes linearly; may be 0.
    """
    progress = min(1.0, env_steps / max(decay_steps, 1))
    return start + (final - start) * progress
