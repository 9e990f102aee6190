"""Tests of environments whose running episodes are saved and restored, by their state or by replaying them."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import catch_env, seeded_envs

from runner.env.base import Env
from runner.env.vector import Vector

HERE = (f"{seeded_envs.__name__}:", f"{catch_env.__name__}:")


def prepared(id: str, **options: Any) -> Env:
    env = Env(id, **options)
    env.prepare()
    return env


def play(vector: Vector, count: int, seed: int) -> list[np.ndarray]:
    """Take random steps, and return what they show."""
    actions, seen = np.random.default_rng(seed), []
    for _ in range(count):
        steps = vector.step(actions.integers(vector.num_actions, size=vector.num_envs))
        seen += [np.concatenate([steps.observations.reshape(-1), steps.rewards, steps.terminated, steps.truncated])]
    return seen


def through_a_file(state: Any, path: Path) -> Any:
    torch.save(state, path)
    return torch.load(path, weights_only=True)


@pytest.mark.cases(
    (f"{HERE[0]}Walk-v0", {}),
    (f"{HERE[0]}GlobalWalk-v0", {}),
    (f"{HERE[0]}Walk-v0", {"vectorization": "async"}),
    (f"{HERE[0]}GlobalWalk-v0", {"vectorization": "async"}),
    ("CartPole-v1", {"vectorization": "async", "max_episode_steps": 15}),
    (f"{HERE[1]}Catch-v0", {"frame_stack": 3}),
)
def test_running_episodes_continue_bitwise_in_another_process_or_object(id, options, tmp_path):
    env = prepared(id, num_envs=3, **options)
    with env.vector(3) as first, env.vector(3) as second:
        for steps in (0, 1, 15, 9, 40):  # just begun, in an episode, at the end of one (of CartPole) and after several
            first.reset(5)
            second.reset(6)
            play(first, steps, steps)
            assert second.load_state_dict(through_a_file(first.state_dict(), tmp_path / "state.pt")) == []
            assert np.array_equal(second.observations, first.observations)
            assert (second.lives is None) == (first.lives is None)
            assert first.lives is None or np.array_equal(second.lives, first.lives)  # pyright: ignore
            assert np.array_equal(play(first, 30, steps), play(second, 30, steps))


@pytest.mark.parametrize("id", ["Walk-v0", "GlobalWalk-v0"])
def test_episodes_are_the_same_one_by_one_and_in_processes(id):
    found = []
    for vectorization in ("sync", "async"):
        with prepared(f"{HERE[0]}{id}", num_envs=2, vectorization=vectorization).vector(2) as vector:
            vector.reset(5)
            found.append(play(vector, 60, 0))
    assert np.array_equal(*found)


def test_environments_that_draw_from_shared_generators_disturb_no_other_code_and_not_each_other():
    env = prepared(f"{HERE[0]}GlobalWalk-v0", num_envs=2)
    before = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()
    with env.vector(2) as vector, env.vector(1) as alone:
        vector.reset([3, 4])
        alone.reset([4])
        for _ in range(30):
            steps, single = vector.step(np.ones(2, np.int64)), alone.step(np.ones(1, np.int64))
            assert np.array_equal(steps.observations[1], single.observations[0])
    assert random.getstate() == before[0]
    assert np.array_equal(np.random.get_state()[1], before[1])
    assert torch.equal(torch.get_rng_state(), before[2])


def test_each_episode_depends_on_its_seed_its_number_and_its_actions_alone():
    env = prepared(f"{HERE[0]}Walk-v0")
    starts = []
    for actions in (0, 2):
        with env.vector(1) as vector:
            vector.reset(5)
            begun = []
            for _ in range(200):
                if not vector.step(np.full(1, actions)).taken[0]:
                    begun.append(vector.observations[0].tolist())
            starts.append(begun[:8])
    assert starts[0] == starts[1]
    assert len({tuple(each) for each in starts[0]}) == 8, "no two episodes begin alike"


@pytest.mark.parametrize("id", ["ClockWalk-v0", "LevelWalk-v0"])
def test_environments_that_are_not_deterministic_are_named(id, tmp_path):
    env = prepared(f"{HERE[0]}{id}", num_envs=2)
    with env.vector(2) as first, env.vector(2) as second:
        first.reset(5)
        second.reset(5)
        play(first, 50, 0)
        assert second.load_state_dict(through_a_file(first.state_dict(), tmp_path / "state.pt")) == [0, 1]
