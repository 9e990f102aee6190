"""Random actions that are repeated for several steps, so that exploration gets further than a random walk."""

from __future__ import annotations

import numpy as np


class Repeats:
    """Temporally extended ε-greedy exploration (Dabney, Ostrovski and Barreto, ICLR 2021).

    A random action is repeated for n steps, where n is drawn from p(n) ∝ n^(-exponent) over 1 to `longest`, but not
    beyond the end of the episode. The paper's exponent μ is 2.
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

        Where `explores` is True, a repetition of `actions` begins, unless the environment is repeating an action.
        """
        begins = explores & (self._left == 0)
        drawn = np.searchsorted(self._cumulative, random.random(len(begins)), side="right") + 1
        self._left[begins] = drawn[begins]
        self._actions[begins] = actions[begins]
        explores = self._left > 0
        self._left[explores] -= 1
        return explores, self._actions.copy()

    def end(self, ended: np.ndarray) -> None:
        self._left[ended] = 0

    def state_dict(self) -> dict[str, list[int]]:
        return {"actions": self._actions.tolist(), "left": self._left.tolist()}

    def load_state_dict(self, state: dict[str, list[int]]) -> None:
        self._actions[:], self._left[:] = state["actions"], state["left"]
