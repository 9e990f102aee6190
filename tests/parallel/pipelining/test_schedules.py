"""Tests of the schedules: the number of micro-batches, and what torch cannot compute."""

from __future__ import annotations

import pytest
import torch
from torch.torch_version import TorchVersion

from runner.config.errors import ConfigError
from runner.parallel.pipelining.schedules import check_split_backward, num_micro_batches

GPIPE, FOUR_1F1B, INTERLEAVED = ("gpipe", 2, 2), ("1f1b", 4, 4), ("interleaved_1f1b", 4, 2)
ZERO_BUBBLE = ("zero_bubble", 2, 2)
Pipeline = tuple[str, int, int]
"""A schedule, and the numbers of stages and processes."""


@pytest.mark.parametrize(
    ("samples", "size", "count", "pipeline", "found"),
    [
        (120, 12, None, GPIPE, 10),
        (120, 12, 10, GPIPE, 10),
        (120, None, None, GPIPE, 8),
        (120, None, None, ("gpipe", 4, 4), 15),
        (12, None, None, ("gpipe", 3, 3), 6),
        (7, None, None, GPIPE, 7),
        (7, 7, None, GPIPE, 1),
        (1, None, None, GPIPE, 1),
        (48, None, None, ("1f1b", 3, 3), 12),
        (10, None, None, ("interleaved_1f1b", 8, 4), 5),
        (64, None, None, ("zero_bubble", 2, 2), 8),
    ],
)
def test_the_number_of_micro_batches(
    samples: int, size: int | None, count: int | None, pipeline: Pipeline, found: int
) -> None:
    assert num_micro_batches(samples, size, count, *pipeline) == found


@pytest.mark.parametrize(
    ("samples", "size", "count", "pipeline", "key", "got", "remedy"),
    [
        (120, 7, None, GPIPE, "split_size", 7, "split_size=6 or parallel.split_size=8"),
        (120, 200, None, GPIPE, "split_size", 200, "split_size=120"),
        (64, None, 65, GPIPE, "num_micro_batches", 65, "num_micro_batches=64"),
        (64, None, 3, GPIPE, "num_micro_batches", 3, "num_micro_batches=2 or parallel.num_micro_batches=4"),
        (64, 8, 4, GPIPE, "num_micro_batches", 4, "one of the two"),
        (64, 32, None, FOUR_1F1B, "split_size", 32, "split_size=16"),
        (8, None, 1, ("interleaved_1f1b", 4, 2), "num_micro_batches", 1, "num_micro_batches=2"),
        (30, None, 5, ZERO_BUBBLE, "num_micro_batches", 5, "num_micro_batches=3 or parallel.num_micro_batches=6"),
        (2, None, None, ("1f1b", 3, 3), "schedule", "1f1b", "parallel.schedule=gpipe"),
    ],
)
def test_the_error_for_an_impossible_split_suggests_the_nearest_possible_ones(
    samples: int, size: int | None, count: int | None, pipeline: Pipeline, key: str, got: object, remedy: str
) -> None:
    with pytest.raises(ConfigError) as refusal:
        num_micro_batches(samples, size, count, *pipeline)
    assert (refusal.value.key, refusal.value.got) == (f"parallel.{key}", got)
    assert remedy in refusal.value.remedy


def test_zero_bubble_with_group_normalization_is_refused_with_a_torch_that_crashes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grouped, batched = (torch.nn.Sequential(norm) for norm in (torch.nn.GroupNorm(1, 2), torch.nn.BatchNorm2d(2)))
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.14.0"))
    check_split_backward("zero_bubble", grouped)
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.11.0+cpu"))
    check_split_backward("1f1b", grouped)
    check_split_backward("zero_bubble", batched)
    with pytest.raises(ConfigError, match=r"zero_bubble.*torch 2\.1[13]\.0\+cpu crashes") as error:
        check_split_backward("zero_bubble", grouped)
    assert error.value.key == "parallel.schedule"
