"""Every stored transition against a slow, obvious reference, on an environment whose episodes end by a script."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
import torch

from runner.env.base import Env
from runner.workloads.dqn.actor import Actor
from runner.workloads.dqn.n_step import NStepBuffer
from runner.workloads.dqn.replay import Replay, unpack


class Scripted(gymnasium.Env):
    """Episodes of 1, 2, 3, … steps, from where the seed says; they end and are cut off by turns.

    An observation is (environment, episode, step), so that each is the only one of its kind. All is written down.
    """

    observation_space = gymnasium.spaces.Box(0, 1e6, (3,), np.float32)
    action_space = gymnasium.spaces.Discrete(4)
    diary: ClassVar[dict[int, list[list[tuple]]]] = {}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        if seed is not None:
            self.name, self.episode = len(self.diary), -1
            self.diary[self.name] = []
        self.episode += 1
        self.now = 0
        self.diary[self.name].append([])
        return self.seen(), {}

    def seen(self) -> np.ndarray:
        return np.array([self.name, self.episode, self.now], np.float32)

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        before = self.seen()
        self.now += 1
        length = (self.name + self.episode) % 9 + 1
        over, kind = self.now == length, (self.name + self.episode // 2) % 3
        terminated, truncated = over and kind != 1, over and kind != 0  # ended, cut off, or both at once
        reward = float(10 * self.name + self.episode + self.now**2 + 1)
        self.diary[self.name][-1].append((before, int(action), reward, self.seen(), terminated))
        return self.seen(), reward, terminated, truncated, {}


@pytest.fixture(autouse=True)
def scripted() -> Iterator[None]:
    gymnasium.register("Scripted-v0", Scripted, disable_env_checker=True)
    Scripted.diary.clear()
    yield
    del gymnasium.registry["Scripted-v0"]


def actor(num_envs: int, length: int, discount: float, capacity: int = 10_000) -> Actor:
    env = Env("Scripted-v0", num_envs)
    env.prepare()
    Scripted.diary.clear()
    return Actor(env.vector(num_envs), 4, NStepBuffer(num_envs, 3, length, discount), Replay(capacity, 3), seed=5)


def reference(length: int, discount: float) -> dict[tuple, tuple]:
    """What the environments' diary amounts to, by window: {observation: (action, return, next, discount)}."""
    wanted = {}
    for episodes in Scripted.diary.values():
        for number, steps in enumerate(episodes):
            finished = number < len(episodes) - 1 or (steps and _over(steps))
            for start in range(len(steps)):
                window = steps[start : start + length]
                if len(window) < length and not finished:
                    continue
                total = sum(discount**i * reward for i, (_, _, reward, _, _) in enumerate(window))
                first, last = window[0], window[-1]
                worth = 0.0 if last[4] else discount ** len(window)
                wanted[tuple(first[0])] = (first[1], total, tuple(last[3]), worth)
    return wanted


def _over(steps: list[tuple]) -> bool:
    name, episode, now = steps[-1][3]
    return now == (name + episode) % 9 + 1


def stored(replay: Replay) -> dict[tuple, tuple]:
    batch = unpack(replay.rows[: len(replay)])
    rows = zip(*(field.tolist() for field in batch), strict=True)
    return {tuple(o): (a[0], r[0], tuple(following), d[0]) for o, a, r, following, d in rows}


@pytest.mark.parametrize("length", [1, 2, 3, 5])
@pytest.mark.parametrize("num_envs", [1, 3])
def test_every_transition_equals_that_of_a_slow_reference(length: int, num_envs: int) -> None:
    agent = actor(num_envs, length, 0.9)
    for steps in range(1, 120):
        agent.step(None, 1.0)
        wanted, got = reference(length, 0.9), stored(agent.replay)
        assert len(agent.replay) == len(got), "an observation was stored twice"
        assert got.keys() == wanted.keys(), steps
    for key, (action, total, following, worth) in wanted.items():
        assert got[key][0] == action
        assert got[key][1] == pytest.approx(total, rel=1e-6)
        assert got[key][2] == following
        assert got[key][3] == pytest.approx(worth, rel=1e-6)
    kinds = {worth == 0 for *_, worth in wanted.values()}
    assert kinds == {True, False}, "the script both ends and cuts off"
    whole = sum(len(episodes) - 1 for episodes in Scripted.diary.values())
    assert agent.num_episodes in range(whole, whole + num_envs + 1)


def test_only_finished_episodes_are_reported() -> None:
    agent = actor(2, 3, 0.9)
    for _ in range(60):
        agent.step(None, 1.0)
    ended = [steps for episodes in Scripted.diary.values() for steps in episodes if steps and _over(steps)]
    told = agent.take_episodes()
    assert told["episode/length"] == pytest.approx(np.mean([len(steps) for steps in ended]))
    assert told["episode/return"] == pytest.approx(np.mean([sum(step[2] for step in steps) for steps in ended]))
    assert agent.take_episodes() == {}


# ---------------------------------------------------------------------------------------------------------------------
# The buffer


def rows(start: int, count: int) -> np.ndarray:
    return np.arange(start, start + count, dtype=np.float32)[:, None] * np.ones(5, np.float32)


@pytest.mark.parametrize("block", [1, 3, 7, 10, 25])
def test_new_transitions_overwrite_the_oldest(block: int) -> None:
    replay = Replay(10, 1)
    address = replay.rows.data_ptr()
    for start in range(0, 10 * block, block):
        replay.add(rows(start, block))
        total = start + block
        assert len(replay) == min(total, 10)
        assert sorted(replay.rows[: len(replay), 0].tolist()) == list(range(max(0, total - 10), total))
    assert replay.rows.data_ptr() == address, "preallocated"


@pytest.mark.parametrize(("saved", "capacity"), [(4, 10), (13, 10), (13, 4), (13, 30), (4, 2)])
def test_a_saved_replay_is_loaded_into_one_of_any_capacity(saved: int, capacity: int) -> None:
    before, after = Replay(10, 1), Replay(capacity, 1)
    before.add(rows(0, saved))
    after.load_state_dict(before.state_dict())
    for start in range(saved, saved + 40):
        kept = range(max(0, saved - min(10, capacity), start - capacity), start)
        assert sorted(after.rows[: len(after), 0].tolist()) == list(kept)
        after.add(rows(start, 1))


def test_samples_are_uniform_and_unpack_to_what_was_stored() -> None:
    agent = actor(1, 1, 0.9)
    for _ in range(200):
        agent.step(None, 1.0)
    count = len(agent.replay)
    drawn = agent.sample(100 * count)
    where = {row.tobytes(): index for index, row in enumerate(agent.replay.rows[:count].numpy())}
    frequency = np.bincount([where[row.tobytes()] for row in drawn.numpy()], minlength=count)
    assert frequency.min() > 50
    assert ((frequency - 100) ** 2 / 100).sum() == pytest.approx(count, abs=5 * (2 * count) ** 0.5)  # χ²
    batch = unpack(drawn[:7])
    assert [tuple(field.shape) for field in batch] == [(7, 3), (7, 1), (7, 1), (7, 3), (7, 1)]
    assert batch.actions.dtype == torch.int64
