"""Random actions that are repeated for several steps, so that exploration gets further than a random walk."""

from __future__ import annotations

import numpy as np


class Repeats:
    """Temporally extended ε-greedy exploration (Dabney, Ostrovski and Barreto, ICLR 2021).

    Plain ε-greedy exploration takes a random action for one step. This class repeats the action for n steps, where n is
    drawn from the heavy-tailed distribution p(n) ∝ n^(-exponent) over 1 to `longest`. The end of an episode ends the
    repetition.

    Args:
        num_envs: number of environments.
        longest: the largest number of steps n.
        exponent: the exponent, μ in the paper, which uses 2. With less, long repetitions are more frequent.
    """

    def __init__(self, num_envs: int, longest: int, exponent: float = 2.0):
        chances = np.arange(1, longest + 1, dtype=np.float64) ** -exponent
        self._cumulative = np.cumsum(chances / chances.sum())
        self._cumulative[-1] = 1.0  # a draw is below 1, so rounding must not lead past the end
        self._actions, self._left = np.zeros(num_envs, np.int64), np.zeros(num_envs, np.int64)

    def extend(
        self, explores: np.ndarray, actions: np.ndarray, random: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return which environments take a random action now, bool [num_envs], and their actions, int64 [num_envs].

        Args:
            explores: which environments begin a new repetition, unless they are repeating an action, bool [num_envs].
            actions: the random action to repeat in each environment that begins a repetition, int64 [num_envs].
            random: the generator for the lengths of the new repetitions.
        """
        begins = explores & (self._left == 0)
        drawn = np.searchsorted(self._cumulative, random.random(len(begins)), side="right") + 1
        self._left[begins] = drawn[begins]
        self._actions[begins] = actions[begins]
        explores = self._left > 0
        self._left[explores] -= 1
        return explores, self._actions.copy()

    def end(self, ended: np.ndarray) -> None:
        """End the repetitions in the environments where `ended`, bool [num_envs], is True."""
        self._left[ended] = 0

    def state_dict(self) -> dict[str, list[int]]:
        """Return the repeated actions, and the numbers of steps for which they will still be repeated."""
        return {"actions": self._actions.tolist(), "left": self._left.tolist()}

    def load_state_dict(self, state: dict[str, list[int]]) -> None:
        self._actions[:], self._left[:] = state["actions"], state["left"]
