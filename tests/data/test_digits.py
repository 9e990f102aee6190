"""Tests of `data=digits`, the digits that scikit-learn contains."""

from __future__ import annotations

import pytest
import torch
from sklearn.datasets import load_digits

from runner.data.digits import Digits
from runner.data.memory import TensorSamples


def loaded(**options) -> tuple[TensorSamples, TensorSamples]:
    train, held_out = Digits(**options).load()
    assert isinstance(train, TensorSamples)
    assert isinstance(held_out, TensorSamples)
    return train, held_out


def images(samples: TensorSamples) -> list[tuple[int, ...]]:
    """Return each sample in the format of scikit-learn: 64 pixels from 0 to 16, and the class."""
    levels = ((samples.inputs * samples.std[0] + samples.mean[0]) * 16).round().long().flatten(1)
    return [tuple(row) for row in torch.cat((levels, samples.targets[:, None]), 1).tolist()]


def test_they_are_scikit_learns():
    bunch = load_digits()
    everything = torch.from_numpy(bunch.data).long(), torch.from_numpy(bunch.target).long()
    expected = [tuple(row) for row in torch.cat((everything[0], everything[1][:, None]), 1).tolist()]
    train, held_out = loaded(size=8)
    assert sorted(images(train) + images(held_out)) == sorted(expected)


def test_the_split_is_the_same_in_every_run_and_has_the_requested_size():
    (train, held_out), again = loaded(size=8), loaded(size=8)
    assert (len(train), len(held_out)) == (1438, 359)
    assert torch.equal(held_out.inputs, again[1].inputs)
    smaller = set(images(loaded(size=8, holdout=0.1)[1]))
    assert smaller < set(images(held_out))
    assert len(loaded(size=8, holdout=0.0001)[1]) == 1  # at least one, because an evaluation needs a sample
    assert set(held_out.targets.tolist()) == set(range(10))


@pytest.mark.parametrize("size", [8, 28])
def test_inputs_are_normalized_and_have_the_requested_size(size):
    train, held_out = loaded(size=size)
    inputs = torch.cat((train.inputs, held_out.inputs))
    assert train.shape == (1, size, size) == tuple(inputs.shape[1:])
    assert inputs.mean().abs() < 1e-5
    assert (inputs.std() - 1).abs() < 1e-5
    assert train.class_names == [str(digit) for digit in range(10)]
