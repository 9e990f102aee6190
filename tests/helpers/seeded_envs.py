"""Environments whose state cannot be read, which draw from different random numbers; importing registers them."""

import random
import time
from typing import Any

import gymnasium
import numpy as np
import torch


class Walk(gymnasium.Env):
    """A walk along a noisy line, which terminates by chance after 8 steps, and is truncated after 20."""

    observation_space = gymnasium.spaces.Box(-99, 99, (3,), np.float32)
    action_space = gymnasium.spaces.Discrete(3)

    def draw(self) -> float:
        return float(self.np_random.random())

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.time, self.place = 0, self.draw()
        return self.seen(), {"lives": 3}

    def seen(self) -> np.ndarray:
        return np.array([self.place, self.time / 10, self.draw()], np.float32)

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.time, self.place = self.time + 1, self.place + int(action) - 1 + self.draw() / 5
        ends = self.time > 8 and self.draw() < 0.2
        return self.seen(), -abs(self.place), ends, self.time == 20, {"lives": 3 - self.time // 7}


class GlobalWalk(Walk):
    """It draws from the generators that all code of a process shares."""

    def draw(self) -> float:
        return (random.random() + float(np.random.random()) + torch.rand(()).item()) / 3


class ClockWalk(Walk):
    """It is not deterministic."""

    def draw(self) -> float:
        return time.perf_counter() % 1


class LevelWalk(Walk):
    """Its rewards depend on the number of its episodes so far, which no observation shows."""

    level = 0

    def reset(self, **given: Any) -> tuple[np.ndarray, dict]:
        self.level += 1
        return super().reset(**given)

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        seen, reward, ended, truncated, info = super().step(action)
        return seen, self.level * reward, ended, truncated, info


class MaskedWalk(Walk):
    """Two of five actions are allowed, others in each step; any other one is an error."""

    action_space = gymnasium.spaces.Discrete(5)

    def info(self) -> dict[str, Any]:
        self.allowed = (self.time % 5, (self.time + 2) % 5)
        return {"action_mask": np.isin(np.arange(5), self.allowed).astype(np.int8)}

    def reset(self, **given: Any) -> tuple[np.ndarray, dict]:
        return super().reset(**given)[0], self.info()

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        if int(action) not in self.allowed:
            raise ValueError(f"action {action} is not allowed")
        return (*super().step(action)[:4], self.info())


for environment in (Walk, GlobalWalk, ClockWalk, LevelWalk, MaskedWalk):
    gymnasium.register(f"{environment.__name__}-v0", environment, disable_env_checker=True)
