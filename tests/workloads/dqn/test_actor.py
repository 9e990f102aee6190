"""Tests of the actor: the episodes that it reports, and its exploration."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from helpers.runs import assert_bitwise_equal
from helpers.scripted_env import ScriptedEnv, is_episode_end, scripted_actor


def test_only_finished_episodes_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = scripted_actor(monkeypatch, 2, 3, 0.9)
    for _ in range(60):
        agent.step(None, 1.0)
    ended = [
        steps
        for episodes in ScriptedEnv.transition_log.values()
        for steps in episodes
        if steps and is_episode_end(steps)
    ]
    means = agent.take_episodes()
    assert means["episode/length"] == pytest.approx(np.mean([len(steps) for steps in ended]))
    assert means["episode/return"] == pytest.approx(np.mean([sum(step[2] for step in steps) for steps in ended]))
    assert agent.take_episodes() == {}


def test_actions_are_random_without_a_policy_and_greedy_without_exploration(monkeypatch: pytest.MonkeyPatch) -> None:
    actor = scripted_actor(monkeypatch, 4, 1, 0.9)
    for _ in range(200):
        actor.step(None, 0.0)
    random = actor.replay.rows[: len(actor.replay), -3].clone()
    assert set(random.tolist()) == {0.0, 1.0, 2.0, 3.0}
    before = len(actor.replay)
    for _ in range(50):
        actor.step(lambda observations: np.full(len(observations), 2), 0.0)
    assert set(actor.replay.rows[before : len(actor.replay), -3].tolist()) == {2.0}
    assert actor.num_steps == 250 * 4


def test_the_possible_returns_are_those_of_the_rewards_seen_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = scripted_actor(monkeypatch, 2, 3, 0.9)
    assert agent.possible_returns() == (0.0, 0.0)
    for _ in range(60):
        agent.step(None, 1.0)
        rewards = [step[2] for episodes in ScriptedEnv.transition_log.values() for steps in episodes for step in steps]
        possible = (min(0.0, *rewards) / (1 - 0.9), max(0.0, *rewards) / (1 - 0.9))
        assert agent.possible_returns() == pytest.approx(possible, rel=1e-6)
    assert possible[0] < 0 < possible[1]
    restored = scripted_actor(monkeypatch, 2, 3, 0.9)
    restored.load_state_dict(agent.state_dict())
    assert restored.possible_returns() == agent.possible_returns()


def test_returns_without_a_discount_or_beyond_float32_are_not_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    unbounded = (-math.inf, math.inf)
    agent = scripted_actor(monkeypatch, 2, 3, 1.0)
    assert agent.possible_returns() == unbounded
    agent = scripted_actor(monkeypatch, 2, 3, 0.9)
    state = agent.state_dict()
    agent.load_state_dict(state | {"rewards": (0.0, 1e38)})
    assert agent.possible_returns() == unbounded


def test_a_restored_actor_continues_with_the_same_exploration(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state of these environments cannot be saved, but exploration, samples and counts continue."""
    first = scripted_actor(monkeypatch, 2, 2, 0.9)
    for _ in range(30):
        first.step(None, 1.0)
    second = scripted_actor(monkeypatch, 2, 2, 0.9)
    second.load_state_dict(first.state_dict())
    assert_bitwise_equal(second.replay.rows, first.replay.rows)
    assert second.num_episodes == first.num_episodes
    first._random.integers(2**62)  # the second actor has drawn this number to seed its new episodes
    assert_bitwise_equal(second.sample(20), first.sample(20))
    assert isinstance(first.sample(1), torch.Tensor)
