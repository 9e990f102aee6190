"""Tests that n-step transitions equal those of a slow, simple reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.runs import assert_bitwise_equal
from helpers.scripted_env import ScriptedEnv, expected_transitions, replay_transitions, scripted_actor

from runner.workloads.dqn.replay import NStepBuffer


@pytest.mark.parametrize("length", [1, 2, 3, 5])
@pytest.mark.parametrize("num_envs", [1, 3])
def test_every_transition_equals_that_of_a_slow_reference(
    length: int, num_envs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_restored_buffer_continues_bitwise() -> None:
    random = np.random.default_rng(0)
    buffers = [NStepBuffer(3, 2, 4, 0.9) for _ in range(2)]
    for time in range(40):
        flags = random.random((3, 3)) < 0.2
        step = (random.random((3, 2)), random.integers(4, size=3), random.random(3), random.random((3, 2)))
        found = [buffer.push(*step, flags[0], flags[1], ~flags[2]).copy() for buffer in buffers[: 1 + (time >= 10)]]
        if time == 9:
            buffers[1].load_state_dict(buffers[0].state_dict())
        if time >= 10:
            assert_bitwise_equal(torch.from_numpy(found[1]), torch.from_numpy(found[0]))
