"""An environment with scripted episode ends, and a simple, slow computation of its n-step transitions."""

from __future__ import annotations

from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.registration import EnvSpec

from runner.env.base import Env
from runner.workloads.dqn.actor import Actor, Repeats
from runner.workloads.dqn.replay import NStepBuffer, Replay, unpack


class ScriptedEnv(gymnasium.Env):
    """Episodes of 1, 2, …, 9 steps in rotation, which are terminated, truncated, or both."""

    observation_space = gymnasium.spaces.Box(0, 1e6, (3,), np.float32)
    action_space = gymnasium.spaces.Discrete(4)
    transition_log: ClassVar[dict[int, list[list[tuple]]]] = {}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        if seed is not None:
            self.name, self.episode = len(self.transition_log), -1
            self.transition_log[self.name] = []
        self.episode += 1
        self.now = 0
        self.transition_log[self.name].append([])
        return self.seen(), {}

    def seen(self) -> np.ndarray:
        return np.array([self.name, self.episode, self.now], np.float32)

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        before = self.seen()
        self.now += 1
        length = (self.name + self.episode) % 9 + 1
        over, kind = self.now == length, (self.name + self.episode // 2) % 3
        terminated, truncated = over and kind != 1, over and kind != 0  # terminated, truncated, or both
        reward = float(10 * self.name + self.episode + self.now**2 + 1) * (-1) ** self.now
        self.transition_log[self.name][-1].append((before, int(action), reward, self.seen(), terminated))
        return self.seen(), reward, terminated, truncated, {}


def scripted_actor(
    monkeypatch: pytest.MonkeyPatch,
    num_envs: int,
    length: int,
    discount: float,
    capacity: int = 10_000,
    repeats: Repeats | None = None,
) -> Actor:
    """An actor in `num_envs` scripted environments, whose transitions combine `length` steps."""
    spec = EnvSpec("Scripted-v0", ScriptedEnv, disable_env_checker=True)
    monkeypatch.setitem(gymnasium.registry, "Scripted-v0", spec)
    env = Env("Scripted-v0", num_envs)
    env.prepare()
    ScriptedEnv.transition_log.clear()
    n_step_buffer = NStepBuffer(num_envs, 3, length, discount)
    return Actor(env.vector(num_envs), 4, n_step_buffer, Replay(capacity, 3), 5, repeats)


def expected_transitions(length: int, discount: float) -> dict[tuple, tuple]:
    """The n-step transitions that follow from the steps in `ScriptedEnv.transition_log`."""
    wanted = {}
    for episodes in ScriptedEnv.transition_log.values():
        for number, steps in enumerate(episodes):
            finished = number < len(episodes) - 1 or (steps and is_episode_end(steps))
            for start in range(len(steps)):
                window = steps[start : start + length]
                if len(window) < length and not finished:
                    continue
                total = sum(discount**i * reward for i, (_, _, reward, _, _) in enumerate(window))
                first, last = window[0], window[-1]
                worth = 0.0 if last[4] else discount ** len(window)
                wanted[tuple(first[0])] = (first[1], total, tuple(last[3]), worth)
    return wanted


def is_episode_end(steps: list[tuple]) -> bool:
    name, episode, now = steps[-1][3]
    return now == (name + episode) % 9 + 1


def replay_transitions(replay: Replay) -> dict[tuple, tuple]:
    batch = unpack(replay.rows[: len(replay)])
    rows = zip(*(field.tolist() for field in batch[:5]), strict=True)
    return {tuple(o): (a[0], r[0], tuple(following), d[0]) for o, a, r, following, d in rows}
