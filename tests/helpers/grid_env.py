"""An environment as a user writes one: walk to the end of a corridor. `env=grid_env.py` names it."""

from typing import Any

import gymnasium
import numpy as np


class Grid(gymnasium.Env):
    """Actions are 0 (left) and 1 (right); each step costs 1, and the episode ends at the right end."""

    observation_space = gymnasium.spaces.Box(0.0, 1.0, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, length: int = 6, render_mode: str | None = None):
        self.length, self.position = length, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.position = int(self.np_random.integers(self.length))
        return self.observation(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.position = max(0, self.position + (1 if action == 1 else -1))
        return self.observation(), -1.0, self.position == self.length, False, {}

    def observation(self) -> np.ndarray:
        return np.array([self.position / self.length], np.float32)


env = Grid
NOTHING = None
gymnasium.register("OfAFile-v0", entry_point=lambda **options: Grid(**options), max_episode_steps=40)
