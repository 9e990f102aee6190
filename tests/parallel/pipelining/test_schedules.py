"""Tests of the schedules: the class in torch, and what torch cannot compute."""

from __future__ import annotations

import pytest
import torch
from torch.torch_version import TorchVersion

from runner.config.errors import ConfigError
from runner.parallel.pipelining.schedules import SCHEDULES, check_split_backward, schedule_class


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
