"""Tests of the replay buffer, a ring buffer of packed transitions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.scripted_env import scripted_actor

from runner.workloads.dqn.replay import Replay, unpack


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


def test_samples_are_uniform_and_unpack_to_what_was_stored(monkeypatch: pytest.MonkeyPatch) -> None:
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
