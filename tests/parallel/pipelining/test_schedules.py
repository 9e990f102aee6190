"""Tests of the schedules: the order of the computations, and the class in torch."""

from __future__ import annotations

import pytest
import torch
from torch.torch_version import TorchVersion

from runner.config.errors import ConfigError
from runner.parallel.pipelining.schedules import SCHEDULES, actions, check_split_backward, schedule_class


def test_1f1b_has_the_order_of_torch() -> None:
    """As in `Schedule1F1B._step_microbatches`, stage i of n computes n − i forward passes before its first backward."""
    assert actions("1f1b", 3, 3, 4)[1] == [
        (1, "forward", 0),
        (1, "forward", 1),
        (1, "backward", 0),
        (1, "forward", 2),
        (1, "backward", 1),
        (1, "forward", 3),
        (1, "backward", 2),
        (1, "backward", 3),
    ]


def test_each_schedule_has_a_class_in_torch() -> None:
    names = [schedule_class(schedule).__name__ for schedule in SCHEDULES]
    assert names == ["ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble"]


@pytest.mark.parametrize(
    ("version", "schedule", "layer", "refused"),
    [
        ("2.11.0+cpu", "zero_bubble", torch.nn.GroupNorm(1, 2), True),
        ("2.13.0+cpu", "zero_bubble", torch.nn.GroupNorm(1, 2), True),
        ("2.14.0", "zero_bubble", torch.nn.GroupNorm(1, 2), False),
        ("2.11.0+cpu", "1f1b", torch.nn.GroupNorm(1, 2), False),
        ("2.11.0+cpu", "zero_bubble", torch.nn.BatchNorm2d(2), False),
    ],
)
def test_zero_bubble_with_group_normalization_is_refused_with_a_torch_that_crashes(
    version: str, schedule: str, layer: torch.nn.Module, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 1), layer)
    if not refused:
        check_split_backward(schedule, model)
        return
    with pytest.raises(ConfigError, match=r"zero_bubble.*torch 2\.1[13]\.0\+cpu crashes") as error:
        check_split_backward(schedule, model)
    assert error.value.key == "parallel.schedule"
