"""The n-step buffer, which combines the steps of vectorized environments into n-step transitions."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from runner.workloads.dqn.replay import row_width


class NStepBuffer:
    """Sums the discounted rewards of `length` steps, or of fewer at the end of an episode, into n-step transitions.

    Sutton and Barto, Reinforcement Learning (2018), chapter 7; Hessel et al., Rainbow (2018). The value after a
    terminated episode is 0; a truncated episode is bootstrapped from its last observation (Pardo et al., Time Limits in
    Reinforcement Learning, 2018).
    """

    def __init__(self, num_envs: int, observation_size: int, length: int, discount: float):
        self.length, self.size, self.discount = length, observation_size, discount
        # A ring buffer of the last `length` steps; all environments write to the same slot at the same time.
        self._rows = np.zeros((length, num_envs, row_width(observation_size)), np.float32)
        self._returns = np.zeros((length, num_envs))
        self._open = np.zeros((length, num_envs), bool)
        self._time = 0
        ages = (np.arange(length)[:, None] - np.arange(length)) % length  # the age of slot j when slot i is written
        self._weights = (discount**ages)[:, :, None]
        self._full_discount = np.float32(discount**length)

    def push(
        self,
        observations: np.ndarray,
        actions: np.ndarray,
        rewards: np.ndarray,
        next_observations: np.ndarray,
        terminated: np.ndarray,
        truncated: np.ndarray,
        taken: np.ndarray,
    ) -> np.ndarray:
        """Add one step of each environment, and return the transitions that these steps complete.

        The arguments are arrays [num_envs, …]; `taken` is False where the environment was reset instead of taking a
        step. Transitions are packed, float32 [m, row_width]; later calls may overwrite this array.
        """
        slot = self._time % self.length
        self._time += 1
        written = self._rows[slot]
        written[:, : self.size] = observations
        written[:, -3] = actions
        self._open[slot] = taken
        self._returns[slot] = 0
        self._returns += self._weights[slot] * rewards
        ended = terminated | truncated
        oldest = (slot + 1) % self.length
        if np.count_nonzero(ended):
            return self._close(slot, oldest, ended, terminated, next_observations)
        rows, full = self._rows[oldest], self._open[oldest]
        rows[:, self.size : -3] = next_observations
        rows[:, -2] = self._returns[oldest]
        rows[:, -1] = self._full_discount
        return rows if full.all() else rows[full]

    def _close(
        self, slot: int, oldest: int, ended: np.ndarray, terminated: np.ndarray, next_observations: np.ndarray
    ) -> np.ndarray:
        """Return the transitions that end with this step, in which at least one episode ends.

        In an environment whose episode ends, all incomplete transitions are completed; in the others, the oldest one.
        """
        closing = self._open & ended
        closing[oldest] |= self._open[oldest]
        self._open &= ~closing
        slots, envs = closing.nonzero()
        rows = self._rows[slots, envs]
        rows[:, self.size : -3] = next_observations[envs]
        rows[:, -2] = self._returns[slots, envs]
        steps = (slot - slots) % self.length + 1
        rows[:, -1] = self.discount**steps * ~terminated[envs]
        return rows

    def state_dict(self) -> dict[str, Any]:
        arrays = {"rows": self._rows, "returns": self._returns, "open": self._open}
        return {"time": self._time} | {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._time = state["time"]
        for array, name in ((self._rows, "rows"), (self._returns, "returns"), (self._open, "open")):
            array[...] = state[name].numpy()
