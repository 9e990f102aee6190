"""Tests of the replay buffer of images, against slow references that stack and store whole observations."""

import threading
from collections import deque
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from helpers.catch_env import Catch

from runner.env.base import Env
from runner.env.vector import Pixels, Steps, pixels_of
from runner.workloads.dqn.actor import Actor
from runner.workloads.dqn.frame_replay import FrameReplay
from runner.workloads.dqn.replay import NStepBuffer, Transitions

CPU = torch.device("cpu")


def catch_actor(num_envs: int, n_step: int, stack: int, capacity: int, **options: Any) -> Actor:
    env = Env("Catch-v0", num_envs, frame_stack=stack, max_episode_steps=11)
    env.prepare()
    replay = FrameReplay(capacity, num_envs, env.pixels, n_step, "cpu")
    return Actor(env.vector(num_envs), 3, NStepBuffer(num_envs, 1, n_step, 0.9), replay, 5, None, **options)


def stored(replay: FrameReplay) -> dict[bytes, tuple]:
    """Return all transitions that can be sampled, by their observation."""
    rows = replay.at(replay.complete[: len(replay)].nonzero()[0])
    batch = replay.batch(rows, CPU)
    found = {}
    for seen, action, total, following, discount in zip(*batch[:5], strict=True):
        key = seen.numpy().tobytes()
        assert key not in found, "a transition is there twice"
        found[key] = (action.item(), total.item(), following.numpy().tobytes(), discount.item())
    return found


class Reference:
    """The transitions of one environment, whose frames are stacked and whose rewards are summed one by one."""

    def __init__(self, seed: int, n_step: int, stack: int, clips: bool, life_ends: bool):
        self.env, self.n_step, self.stack = Catch(), n_step, stack
        self.clips, self.life_ends = clips, life_ends
        self.found: list[tuple[bytes, tuple]] = []
        self.env.episode = 0  # the actor has begun another episode before
        self.start(seed)

    def start(self, seed: int | None = None) -> None:
        frame, info = self.env.reset(seed=seed)
        self.frames: deque[np.ndarray] = deque([frame] * self.stack, self.stack)
        self.open: list[tuple[bytes, int, list[float]]] = []
        self.lives, self.time, self.over = info["lives"], 0, False

    def step(self, action: int) -> None:
        if self.over:  # the vector resets it in this step, and ignores the action
            self.start()
            return
        before = np.stack(self.frames).tobytes()
        frame, reward, terminated, _, info = self.env.step(action)
        self.frames.append(frame)
        self.time += 1
        self.over = terminated or self.time == 11
        terminated |= self.life_ends and info["lives"] < self.lives
        self.lives = info["lives"]
        self.open.append((before, action, []))
        for _, _, rewards in self.open:
            rewards.append(float(np.clip(reward, -1, 1)) if self.clips else reward)
        closing = [each for each in self.open if len(each[2]) == self.n_step or terminated or self.over]
        self.open = [each for each in self.open if each not in closing]
        for seen, first_action, rewards in closing:
            total = sum(0.9**i * reward for i, reward in enumerate(rewards))
            worth = 0.0 if terminated else 0.9 ** len(rewards)
            self.found.append((seen, (first_action, total, np.stack(self.frames).tobytes(), worth)))


@pytest.mark.parametrize(
    ("num_envs", "n_step", "stack", "capacity", "clips", "life_ends"),
    [(1, 1, 4, 40, True, True), (3, 1, 4, 90, False, False), (2, 3, 3, 61, True, False), (3, 5, 1, 60, False, True)],
)
def test_every_transition_equals_that_of_a_slow_reference(num_envs, n_step, stack, capacity, clips, life_ends):
    actor = catch_actor(num_envs, n_step, stack, capacity, clip_rewards=clips, terminal_on_life_loss=life_ends)
    vector: Any = actor.vector
    seeds = list(range(num_envs))
    vector.reset(seeds)
    references = [Reference(seed, n_step, stack, clips, life_ends) for seed in seeds]
    random, episodes, kinds = np.random.default_rng(0), 0, set()
    for _ in range(150):
        given = random.integers(3, size=num_envs)
        actor.step(lambda seen, masks, given=given: given, 0.0)
        for reference, action in zip(references, given, strict=True):
            reference.step(int(action))
        got, wanted = stored(actor.replay), {}  # pyright: ignore[reportArgumentType]
        for reference in references:
            wanted |= dict(reference.found)
        for key, (action, total, following, worth) in got.items():
            assert (action, following) == (wanted[key][0], wanted[key][2])
            assert (total, worth) == (pytest.approx(wanted[key][1], rel=1e-6), pytest.approx(wanted[key][3]))
            kinds.add(worth)
        newest = [dict(each.found[-(capacity // num_envs - 12) :]) for each in references]
        assert all(seen in got for each in newest for seen in each), "one of the newest transitions is missing"
        assert len(got) <= capacity + num_envs * (n_step + stack)
        episodes = actor.num_episodes
    assert episodes > 20 * num_envs / 2
    assert 0.0 in kinds
    assert len(kinds) > 1


def test_sampled_transitions_are_uniform_and_only_complete_ones():
    actor = catch_actor(2, 2, 4, 60)
    for _ in range(90):
        actor.step(None, 1.0)
    usable = actor.replay.complete.nonzero()[0]  # pyright: ignore[reportAttributeAccessIssue]
    rows = actor.sample(200 * len(usable))
    counts = np.bincount(rows[:, 0].long().numpy(), minlength=actor.replay.capacity)
    assert set(counts.nonzero()[0]) == set(usable)
    assert ((counts[usable] - 200) ** 2 / 200).sum() == pytest.approx(len(usable), abs=5 * (2 * len(usable)) ** 0.5)


NUM_ENVS, SIDE, TIMES_PER_PART = 16, 8, 128


def filled(num_steps: int, capacity: int) -> FrameReplay:
    """Return a buffer to which `num_steps` steps with random frames were added, and whose parts are small."""
    replay = FrameReplay(capacity, NUM_ENVS, Pixels((), (1, SIDE, SIDE), 2, 1 / 255), 1, "cpu")
    replay.times_per_part = TIMES_PER_PART
    add(replay, 0, num_steps)
    return replay


def random_frames(time: int) -> np.ndarray:
    return np.random.default_rng(time).integers(256, size=(NUM_ENVS, 2, SIDE, SIDE), dtype=np.uint8)


def add(replay: FrameReplay, first: int, last: int) -> None:
    window, over, taken = NStepBuffer(NUM_ENVS, 1, 1, 0.9), np.zeros(NUM_ENVS, bool), np.ones(NUM_ENVS, bool)
    for step in range(first, last):
        seen, following = random_frames(step), random_frames(step + 1)
        actions, rewards = np.full(NUM_ENVS, step), np.full(NUM_ENVS, float(step))
        replay.store(window, seen, actions, Steps(following, rewards, over, over, taken))


def write(parts: dict[str, Any], directory: Path) -> dict[str, Path]:
    for name, part in parts.items():
        with (directory / name).open("wb") as file:
            part.write(file)
        part.written.set()
    return {name: directory / name for name in parts}


@pytest.mark.parametrize(("num_steps", "capacity"), [(100, 10_000), (300, 10_000), (300, 2400), (420, 2400)])
def test_a_buffer_restored_from_its_parts_has_the_same_transitions(num_steps, capacity, tmp_path):
    replay = filled(num_steps, capacity)
    state, parts = replay.state_dict(), replay.parts()
    files = write(parts, tmp_path)
    restored = filled(0, capacity)
    assert restored.fits(state)
    restored.load_state_dict(state, files)
    for each in (replay, restored):
        add(each, num_steps, num_steps + 3)
    usable = replay.complete.nonzero()[0]
    assert np.array_equal(usable, restored.complete.nonzero()[0])
    batches: list[Transitions] = [each.batch(each.at(usable), CPU) for each in (replay, restored)]
    for got, wanted in zip(batches[1][:5], batches[0][:5], strict=True):
        assert torch.equal(got, wanted)
    assert not filled(0, capacity + 20 * NUM_ENVS).fits(state)


def test_a_part_keeps_its_name_and_its_content_while_the_buffer_grows(tmp_path):
    replay, contents = filled(300, 10_000), []
    for index, steps in enumerate((0, 100)):
        add(replay, 300, 300 + steps)
        (tmp_path / str(index)).mkdir()
        files = write(replay.parts(), tmp_path / str(index))
        contents.append({name: path.read_bytes() for name, path in files.items()})
    assert {len(content) for content in contents[1].values()} == {TIMES_PER_PART * NUM_ENVS * SIDE**2}
    assert (len(contents[0]), len(contents[1])) == (2, 3)
    assert contents[0].items() <= contents[1].items()
    large = FrameReplay(2400, 16, Pixels((), (1, 128, 128), 2, 1 / 255), 1, "cpu")
    assert large.times_per_part * 16 * 128**2 == 2**25, "32 MiB"


def test_frames_are_not_overwritten_before_a_checkpoint_in_the_background_has_them(tmp_path):
    replay = filled(300, 2400)  # the ring holds 153 times
    parts = replay.parts()
    adding = threading.Thread(target=add, args=(replay, 300, 420), daemon=True)
    adding.start()
    adding.join(0.3)
    assert adding.is_alive(), "it waits"
    files = write(parts, tmp_path)
    adding.join(60)
    assert not adding.is_alive()
    [file] = files.values()
    frames = np.frombuffer(file.read_bytes(), np.uint8).reshape(-1, NUM_ENVS, SIDE, SIDE)
    for time in (148, 200, 255):  # of the times 128 to 255, the ring held those from 148 on
        assert np.array_equal(frames[time - 128], random_frames(time)[:, 1])


@pytest.mark.parametrize("change", ["a row of another buffer", "a part is missing", "a part is short", "no transition"])
def test_other_content_of_a_checkpoint_is_refused(change, tmp_path):
    replay = filled(300, 10_000)
    state, files = replay.state_dict(), write(replay.parts(), tmp_path)
    if change == "a row of another buffer":
        state["rows"][7, 1] = 10_000_000
    elif change == "a part is missing":
        files.popitem()
    elif change == "a part is short":
        next(iter(files.values())).write_bytes(b"1234")
    else:
        state["complete"][:] = False
    with pytest.raises((RuntimeError, LookupError, ValueError)):
        filled(0, 10_000).load_state_dict(state, files)


@pytest.mark.cases(
    ((5, 7), None, (1, 5, 7), ()),
    ((5, 7, 3), None, (3, 5, 7), (0, 3, 1, 2)),
    ((3, 5, 7), "first", (3, 5, 7), (0, 1, 2, 3)),
    ((3, 5, 7), "last", (7, 3, 5), (0, 3, 1, 2)),
    ((10, 10, 10), None, (10, 10, 10), (0, 3, 1, 2)),
    ((8, 8, 12), None, (12, 8, 8), (0, 3, 1, 2)),
    ((5, 5, 8), None, (8, 5, 5), (0, 3, 1, 2)),
    ((12, 8, 8), "first", (12, 8, 8), (0, 1, 2, 3)),
)
def test_images_become_stacks_with_their_channels_first(shape, channels, frame, axes):
    pixels = pixels_of("Game-v0", gymnasium.spaces.Box(0, 255, shape, np.uint8), 3, channels)
    assert pixels == Pixels(axes, frame, 3, 1 / 255)
    images, later = (np.random.default_rng(seed).integers(256, size=(2, *shape), dtype=np.uint8) for seed in (1, 2))
    first = pixels.stacked(np.zeros((2, *pixels.shape), np.uint8), images, np.ones(2, bool))
    assert first.shape == (2, 3 * frame[0], *frame[1:])
    second = pixels.stacked(first, later, np.array([False, True]))
    frames = [each.transpose(axes) if axes else each[:, None] for each in (images, later)]
    assert np.array_equal(second[0], np.concatenate([frames[0][0], frames[0][0], frames[1][0]]))
    assert np.array_equal(second[1], np.concatenate([frames[1][1]] * 3))
