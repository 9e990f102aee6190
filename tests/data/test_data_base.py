"""The contract of a data set: what all collections share."""

from __future__ import annotations

import pytest

from runner.data.base import DataError, Samples, shard_bounds


@pytest.mark.parametrize("length", [0, 1, 5, 12, 1797])
@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_shards_cover_all_samples_evenly(length, count):
    bounds = [shard_bounds(length, (index, count)) for index in range(count)]
    assert [i for start, stop in bounds for i in range(start, stop)] == list(range(length))
    sizes = [stop - start for start, stop in bounds]
    assert max(sizes) - min(sizes) <= 1


def test_a_data_error_says_what_why_and_what_to_do():
    error = DataError("a/b.jpg", "it is empty", "data.on_error=skip goes on without it")
    assert str(error) == "a/b.jpg: it is empty\n  data.on_error=skip goes on without it"


def test_samples_have_nothing_to_tell_by_default():
    assert Samples().notes() == {}
