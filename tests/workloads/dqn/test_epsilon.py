"""Tests of ε, the probability of a random action."""

from __future__ import annotations

import pytest

from runner.workloads.dqn.epsilon import epsilon


def test_epsilon_changes_linearly_and_then_stays() -> None:
    values = [epsilon(at, start=0.8, final=0.2, decay_steps=1000) for at in (0, 250, 500, 1000, 2000)]
    assert values == pytest.approx([0.8, 0.65, 0.5, 0.2, 0.2])


def test_without_decay_epsilon_is_final_from_the_first_step() -> None:
    assert [epsilon(at, start=1.0, final=0.1, decay_steps=0) for at in (1, 2)] == pytest.approx([0.1, 0.1])
