"""Tests of images as an agent sees them: which axis has the channels, skipped frames, and the length of episodes."""

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.registration import EnvSpec
from helpers.compose import build_composed_run, prepare_session

from runner.config.errors import ConfigError
from runner.env.base import Env


class Clock(gymnasium.Env):
    """Images whose pixels are the number of the frame, which terminate after `length` frames; each pays 1."""

    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, shape: tuple[int, ...] = (6, 6), length: int = 99) -> None:
        self.observation_space = gymnasium.spaces.Box(0, 255, tuple(shape), np.uint8)
        self.length, self.time, self.image = length, 0, np.zeros(shape, np.uint8)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.time = 0
        self.image[...] = 0
        return self.image, {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.time += 1
        self.image[...] = self.time  # the same array each time, as fast environments return
        self.image.flat[0] = 200 if self.time % 2 else 100  # flickers
        return self.image, 1.0, self.time == self.length, False, {}


@pytest.fixture(autouse=True)
def _registered(monkeypatch) -> None:
    limited = EnvSpec("Limited-v0", Clock, disable_env_checker=True, max_episode_steps=10)
    for spec in (EnvSpec("Clock-v0", Clock, disable_env_checker=True), limited):
        monkeypatch.setitem(gymnasium.registry, spec.id, spec)


def steps_of(count: int, **options: Any) -> list[tuple[int, int, float, bool, bool]]:
    """Return the newest frame (a pixel that flickers, another one), the reward and the ends of some steps."""
    env = Env(num_envs=1, **options)
    env.prepare()
    with env.vector(1) as vector:
        vector.reset(0)
        taken = [vector.step(np.zeros(1, np.int64)) for _ in range(count)]
    newest = [steps.observations[0, -1] for steps in taken]
    flags = [(float(s.rewards[0]), bool(s.terminated[0]), bool(s.truncated[0])) for s in taken]
    return [(int(i[0, 0]), int(i[0, 1]), *each) for i, each in zip(newest, flags, strict=True)]


@pytest.mark.cases(
    ("Limited-v0", {}, [(200, 4, 4.0), (200, 8, 4.0), (200, 10, 2.0)], False),  # 10 frames: the third step has two
    ("Clock-v0", {"length": 9}, [(200, 4, 4.0), (200, 8, 4.0), (200, 9, 1.0)], True),
    ("Clock-v0", {"length": 5}, [(200, 4, 4.0), (200, 5, 1.0)], True),
)
def test_the_last_observation_of_an_episode_that_ends_among_skipped_frames_is_its_own(id, options, seen, terminates):
    steps = steps_of(len(seen) + 1, id=id, options=options, frame_skip=4)
    wanted = [(*each, False, False) for each in seen[:-1]] + [(*seen[-1], terminates, not terminates)]
    assert steps == [*wanted, (0, 0, 0.0, False, False)], "then a reset"


def test_the_length_of_episodes_is_counted_in_steps_of_the_agent():
    steps = steps_of(6, id="Limited-v0", frame_skip=4, frame_stack=2, max_episode_steps=5)
    assert [each[1] for each in steps] == [4, 8, 12, 16, 20, 0]
    assert [each[-1] for each in steps] == [False, False, False, False, True, False]
    for options, longest in (({"max_episode_steps": 5}, 5), ({}, 3)):
        env = Env("Limited-v0", frame_skip=4, **options)
        env.prepare()
        assert env.longest == longest, "a registered limit is one of frames: 10 are three steps"


@pytest.mark.cases(
    ([8, 8, 12], "", "12×8×8 (12 channels, the last axis"),
    ([5, 5, 8], "", "8×5×5 (8 channels, the last axis"),
    ([6, 7, 2], "", "2×6×7 (2 channels, the last axis"),
    ([12, 8, 8], "env.channels=first", "12×8×8 (12 channels, the first axis"),
    ([6, 7, 12], "env.channels=last", "12×6×7 (12 channels, the last axis"),
)
def test_channels_are_in_the_last_axis_unless_another_is_named_and_the_run_says_where(shape, typed, said):
    run = build_composed_run(
        "workload=dqn", "env.id=Clock-v0", "model=tiny", f"env.options={{shape: {shape}}}", *typed.split()
    )
    prepare_session(run)
    assert f"observations of {said} of the images)" in run.workload.describe()["env"]


@pytest.mark.cases(
    ([6, 7, 12], "", "channels", "env.channels=last"),
    ([3, 84, 84], "", "channels", "env.channels=first"),
    ([3, 84, 84], "env.image_size=42", "channels", "env.channels=first"),  # it would be one of 42×42 with 84 channels
    ([3, 84, 84], "env.channels=first env.grayscale=true", "channels", "leave"),
    ([8, 8], "env.channels=last", "channels", "leave it out"),
    ([9], "env.channels=last model=qnet", "channels", "leave it out"),
)
def test_images_whose_channels_are_in_doubt_are_refused(shape, typed, key, remedy):
    run = build_composed_run(
        "workload=dqn", "env.id=Clock-v0", "model=tiny", f"env.options={{shape: {shape}}}", *typed.split()
    )
    with pytest.raises(ConfigError) as refusal:
        prepare_session(run)
    assert refusal.value.key == f"env.{key}"
    assert remedy in refusal.value.remedy
