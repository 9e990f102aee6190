"""Tests of repeated random actions: the lengths of repetitions, and that only the end of an episode interrupts them."""

from __future__ import annotations

import numpy as np
import pytest

from runner.workloads.dqn.actor import Repeats

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
def test_repetition_lengths_have_the_distribution_of_the_paper(exponent: float) -> None:
    """Each repetition has its own action, so the length of a repetition is the number of steps with its action."""
    explores, actions = explored(1.0, 400, exponent)
    assert explores.all()
    _, lengths = np.unique(actions[:-LONGEST], return_counts=True)
    chances = np.arange(1, LONGEST + 1.0) ** -exponent
    counts = np.bincount(lengths, minlength=LONGEST + 1)[1:]
    assert len(counts) == LONGEST
    assert counts / counts.sum() == pytest.approx(chances / chances.sum(), abs=0.01)


def test_a_repetition_is_not_interrupted_by_later_draws() -> None:
    explores, actions = explored(0.1, 300)
    begun = actions // NUM_ENVS == np.arange(300)[:, None]  # the value of an action encodes the step of its draw
    continued = explores[1:] & ~begun[1:]
    assert continued.any()
    assert (explores[:-1][continued] & (actions[1:] == actions[:-1])[continued]).all()


def test_the_end_of_an_episode_ends_the_repetition() -> None:
    random, repeats = np.random.default_rng(0), Repeats(NUM_ENVS, LONGEST)
    everywhere, nowhere = np.ones(NUM_ENVS, bool), np.zeros(NUM_ENVS, bool)
    repeats.extend(everywhere, np.zeros(NUM_ENVS, np.int64), random)
    ended = np.arange(NUM_ENVS) % 2 == 0
    repeats.end(ended)
    explores, _ = repeats.extend(nowhere, np.ones(NUM_ENVS, np.int64), random)
    assert not explores[ended].any()
    assert explores[~ended].any()


def test_restored_repetitions_continue_identically() -> None:
    random, first, second = np.random.default_rng(3), Repeats(NUM_ENVS, LONGEST), Repeats(NUM_ENVS, LONGEST)
    first.extend(random.random(NUM_ENVS) < 0.5, np.arange(NUM_ENVS), random)
    second.load_state_dict(first.state_dict())
    draws, fresh = random.random((LONGEST, NUM_ENVS)) < 0.1, np.full(NUM_ENVS, -1)
    for step in range(LONGEST):
        one, other = (each.extend(draws[step], fresh, np.random.default_rng(step)) for each in (first, second))
        np.testing.assert_array_equal(one[0], other[0])
        np.testing.assert_array_equal(one[1][one[0]], other[1][other[0]])
