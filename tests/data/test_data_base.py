"""Tests of `runner.data.base`, the base classes of data sets."""

from __future__ import annotations

import pytest
import torch

from runner.data.base import Data, DataError, Samples, shard_bounds


@pytest.mark.parametrize("length", [0, 1, 5, 12, 1797])
@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_shards_cover_all_samples_evenly(length, count):
    bounds = [shard_bounds(length, (index, count)) for index in range(count)]
    assert [i for start, stop in bounds for i in range(start, stop)] == list(range(length))
    sizes = [stop - start for start, stop in bounds]
    assert max(sizes) - min(sizes) <= 1


def test_a_data_error_states_what_why_and_the_remedy():
    error = DataError("a/b.jpg", "it is empty", "data.on_error=skip goes on without it")
    assert str(error) == "a/b.jpg: it is empty\n  data.on_error=skip goes on without it"


class NoSamples(Samples):
    """A minimal subclass, without samples."""

    def __len__(self) -> int:
        return 0

    def batches(self, micros, seed, device):
        return iter(())

    def in_order(self, batch_size, shard, device):
        return iter(())

    def display_images(self, indices):
        return torch.zeros(0, 1, 1, 1, dtype=torch.uint8)


def test_samples_have_no_extra_results_by_default():
    assert NoSamples().extra_results() == {}


def test_samples_and_data_are_abstract():
    assert Samples.__abstractmethods__ == {"__len__", "batches", "in_order"}
    assert Data.__abstractmethods__ == {"load"}
