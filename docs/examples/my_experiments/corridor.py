"""An environment: walk to the end of a corridor. Importing this module registers it with gymnasium."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np


class Corridor(gymnasium.Env):
    """Actions are 0 (left) and 1 (right); each step costs 1, and the episode ends at the right end."""

    LENGTH = 10

    def __init__(self, render_mode: str | None = None):
        self.render_mode = render_mode
        self.observation_space = gymnasium.spaces.Box(0.0, 1.0, (1,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(2)
        self.position = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.position = int(self.np_random.integers(self.LENGTH))
        return self._observation(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.position = max(0, self.position + (1 if action == 1 else -1))
        return self._observation(), -1.0, self.position == self.LENGTH, False, {}

    def _observation(self) -> np.ndarray:
        return np.array([self.position / self.LENGTH], np.float32)


gymnasium.register("Corridor-v0", entry_point="my_experiments.corridor:Corridor", max_episode_steps=50)
