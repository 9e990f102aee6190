"""Tests of the actor, its exploration, n-step transitions and the replay buffer, against slow, simple references."""

import math
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.envs.registration import EnvSpec
from helpers.runs import assert_bitwise_equal

from runner.env.base import Env
from runner.env.vector import Steps
from runner.workloads.dqn.actor import Actor, Repeats
from runner.workloads.dqn.replay import NStepBuffer, Replay, unpack

CPU = torch.device("cpu")


class ScriptedEnv(gymnasium.Env):
    """Episodes of 1, 2, …, 9 steps in rotation, which are terminated, truncated, or both."""

    metadata: ClassVar[dict[str, Any]] = {"plain_state": True, "render_modes": []}
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


def scripted_actor(monkeypatch: pytest.MonkeyPatch, num_envs: int, length: int, discount: float) -> Actor:
    """An actor in `num_envs` scripted environments, whose transitions combine `length` steps."""
    spec = EnvSpec("Scripted-v0", ScriptedEnv, disable_env_checker=True)
    monkeypatch.setitem(gymnasium.registry, "Scripted-v0", spec)
    env = Env("Scripted-v0", num_envs)
    env.prepare()
    ScriptedEnv.transition_log.clear()
    n_step_buffer = NStepBuffer(num_envs, 3, length, discount)
    return Actor(env.vector(num_envs), 4, n_step_buffer, Replay(10_000, 3), 5, None)


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


def test_only_finished_episodes_are_reported(monkeypatch):
    agent = scripted_actor(monkeypatch, 2, 3, 0.9)
    for _ in range(60):
        agent.step(None, 1.0)
    episodes = [steps for of_env in ScriptedEnv.transition_log.values() for steps in of_env]
    ended = [steps for steps in episodes if steps and is_episode_end(steps)]
    means = agent.take_episodes()
    assert means["episode/length"] == pytest.approx(np.mean([len(steps) for steps in ended]))
    assert means["episode/return"] == pytest.approx(np.mean([sum(step[2] for step in steps) for steps in ended]))
    assert agent.take_episodes() == {}


def test_actions_are_random_without_a_policy_and_greedy_without_exploration(monkeypatch):
    actor = scripted_actor(monkeypatch, 4, 1, 0.9)
    for _ in range(200):
        actor.step(None, 0.0)
    random = actor.replay.rows[: len(actor.replay), -3].clone()
    assert set(random.tolist()) == {0.0, 1.0, 2.0, 3.0}
    before = len(actor.replay)
    for _ in range(50):
        actor.step(lambda observations, masks: np.full(len(observations), 2), 0.0)
    assert set(actor.replay.rows[before : len(actor.replay), -3].tolist()) == {2.0}
    assert actor.num_steps == 250 * 4


def test_the_possible_returns_are_those_of_the_rewards_seen_so_far(monkeypatch):
    agent = scripted_actor(monkeypatch, 2, 3, 0.9)
    assert agent.possible_returns(CPU) == (0.0, 0.0)
    for _ in range(60):
        agent.step(None, 1.0)
        rewards = [step[2] for episodes in ScriptedEnv.transition_log.values() for steps in episodes for step in steps]
        possible = (min(0.0, *rewards) / (1 - 0.9), max(0.0, *rewards) / (1 - 0.9))
        assert [*map(float, agent.possible_returns(CPU))] == pytest.approx([*possible], rel=1e-6)
    assert possible[0] < 0 < possible[1]
    restored = scripted_actor(monkeypatch, 2, 3, 0.9)
    restored.load_state_dict(agent.state_dict())
    assert restored.possible_returns(CPU) == agent.possible_returns(CPU)
    for discount, rewards in ((1.0, (0.0, 0.0)), (0.9, (0.0, 1e38))):
        agent = scripted_actor(monkeypatch, 2, 3, discount)
        agent.load_state_dict(agent.state_dict() | {"rewards": rewards})
        assert agent.possible_returns(CPU) == (-math.inf, math.inf)


def test_a_restored_actor_continues_with_the_same_exploration(monkeypatch):
    """Older checkpoints have no state of such environments, but exploration, samples and counts continue."""
    first = scripted_actor(monkeypatch, 2, 2, 0.9)
    for _ in range(30):
        first.step(None, 1.0)
    second = scripted_actor(monkeypatch, 2, 2, 0.9)
    second.load_state_dict(first.state_dict() | {"environments": None})
    assert_bitwise_equal(second.replay.rows, first.replay.rows)
    assert second.num_episodes == first.num_episodes
    first._random.integers(2**62)  # the second actor has drawn this number to seed its new episodes
    assert_bitwise_equal(second.sample(20), first.sample(20))
    assert isinstance(first.sample(1), torch.Tensor)


NUM_ENVS, LONGEST = 500, 6


def explored(chance: float, num_steps: int, exponent: float = 2.0) -> tuple[np.ndarray, np.ndarray]:
    """Return which of 500 environments explore in each step, and their actions, both [num_steps, 500].

    In each step, an environment that is not repeating an action begins a repetition with probability `chance`. No two
    repetitions have the same action.
    """
    random, repeats = np.random.default_rng(1), Repeats(NUM_ENVS, LONGEST, exponent)
    steps = []
    for step in range(num_steps):
        fresh = np.arange(step * NUM_ENVS, (step + 1) * NUM_ENVS)
        steps.append(repeats.extend(random.random(NUM_ENVS) < chance, fresh, random))
    explores, actions = zip(*steps, strict=True)
    return np.stack(explores), np.stack(actions)


@pytest.mark.parametrize("exponent", [2.0, 1.0, 0.0])
def test_repetition_lengths_have_the_distribution_of_the_paper(exponent):
    """Each repetition has its own action, so the length of a repetition is the number of steps with its action."""
    explores, actions = explored(1.0, 400, exponent)
    assert explores.all()
    _, lengths = np.unique(actions[:-LONGEST], return_counts=True)
    chances = np.arange(1, LONGEST + 1.0) ** -exponent
    counts = np.bincount(lengths, minlength=LONGEST + 1)[1:]
    assert len(counts) == LONGEST
    assert counts / counts.sum() == pytest.approx(chances / chances.sum(), abs=0.01)


def test_the_end_of_an_episode_ends_the_repetition():
    random, repeats = np.random.default_rng(0), Repeats(NUM_ENVS, LONGEST)
    everywhere, nowhere = np.ones(NUM_ENVS, bool), np.zeros(NUM_ENVS, bool)
    repeats.extend(everywhere, np.zeros(NUM_ENVS, np.int64), random)
    ended = np.arange(NUM_ENVS) % 2 == 0
    repeats.end(ended)
    explores, _ = repeats.extend(nowhere, np.ones(NUM_ENVS, np.int64), random)
    assert not explores[ended].any()
    assert explores[~ended].any()


@pytest.mark.parametrize("length", [1, 2, 3, 5])
@pytest.mark.parametrize("num_envs", [1, 3])
def test_every_transition_equals_that_of_a_slow_reference(length, num_envs, monkeypatch):
    agent = scripted_actor(monkeypatch, num_envs, length, 0.9)
    for steps in range(1, 120):
        agent.step(None, 1.0)
        wanted, got = expected_transitions(length, 0.9), replay_transitions(agent.replay)
        assert len(agent.replay) == len(got), "an observation was stored twice"
        assert got.keys() == wanted.keys(), steps
    for key, (action, total, following, worth) in wanted.items():
        assert got[key][0] == action
        assert got[key][1] == pytest.approx(total, rel=1e-6)
        assert got[key][2] == following
        assert got[key][3] == pytest.approx(worth, rel=1e-6)
    kinds = {worth == 0 for *_, worth in wanted.values()}
    assert kinds == {True, False}, "the script both ends and cuts off"
    whole = sum(len(episodes) - 1 for episodes in ScriptedEnv.transition_log.values())
    assert agent.num_episodes in range(whole, whole + num_envs + 1)


def test_a_restored_buffer_continues_bitwise():
    random = np.random.default_rng(0)
    buffers = [NStepBuffer(3, 2, 4, 0.9) for _ in range(2)]
    for time in range(40):
        flags = random.random((3, 3)) < 0.2
        seen, actions, rewards = random.random((3, 2)), random.integers(4, size=3), random.random(3)
        steps = Steps(random.random((3, 2)), rewards, flags[0], flags[1], ~flags[2])
        found = [buffer.push(seen, actions, steps).copy() for buffer in buffers[: 1 + (time >= 10)]]
        if time == 9:
            buffers[1].load_state_dict(buffers[0].state_dict())
        if time >= 10:
            assert_bitwise_equal(torch.from_numpy(found[1]), torch.from_numpy(found[0]))


def numbered(start: int, count: int) -> np.ndarray:
    return np.arange(start, start + count, dtype=np.float32)[:, None] * np.ones(5, np.float32)


@pytest.mark.parametrize("block", [1, 3, 7, 10, 25])
def test_new_transitions_overwrite_the_oldest(block):
    replay = Replay(10, 1)
    address = replay.rows.data_ptr()
    for start in range(0, 10 * block, block):
        replay.add(numbered(start, block))
        total = start + block
        assert len(replay) == min(total, 10)
        assert sorted(replay.rows[: len(replay), 0].tolist()) == list(range(max(0, total - 10), total))
    assert replay.rows.data_ptr() == address, "preallocated"


@pytest.mark.parametrize(("saved", "capacity"), [(4, 10), (13, 10), (13, 4), (13, 30), (4, 2)])
def test_a_saved_replay_is_loaded_into_one_of_any_capacity(saved, capacity):
    before, after = Replay(10, 1), Replay(capacity, 1)
    before.add(numbered(0, saved))
    after.load_state_dict(before.state_dict())
    for start in range(saved, saved + 40):
        kept = range(max(0, saved - min(10, capacity), start - capacity), start)
        assert sorted(after.rows[: len(after), 0].tolist()) == list(kept)
        after.add(numbered(start, 1))


def test_samples_are_uniform_and_unpack_to_what_was_stored(monkeypatch):
    agent = scripted_actor(monkeypatch, 1, 1, 0.9)
    for _ in range(200):
        agent.step(None, 1.0)
    count = len(agent.replay)
    drawn = agent.sample(100 * count)
    where = {row.tobytes(): index for index, row in enumerate(agent.replay.rows[:count].numpy())}
    frequency = np.bincount([where[row.tobytes()] for row in drawn.numpy()], minlength=count)
    assert frequency.min() > 50
    assert ((frequency - 100) ** 2 / 100).sum() == pytest.approx(count, abs=5 * (2 * count) ** 0.5)  # χ²
    batch = unpack(drawn[:7])
    assert [tuple(field.shape) for field in batch[:5]] == [(7, 3), (7, 1), (7, 1), (7, 3), (7, 1)]
    assert batch.actions.dtype == torch.int64
