"""The schedules of a pipeline: in which order its workers compute the forward and backward passes."""

from __future__ import annotations

from typing import Any

import torch

from runner.config.errors import check

_CLASSES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "zero_bubble": "ScheduleInterleavedZeroBubble",
}

SCHEDULES = tuple(_CLASSES)
"""The values of `parallel.schedule`."""

ONE_STAGE_EACH = ("gpipe", "1f1b")
"""The schedules with exactly one stage per worker."""


def schedule_class(schedule: str) -> Any:
    """Return the class of `torch.distributed.pipelining` that implements `schedule`."""
    from torch.distributed import pipelining

    return getattr(pipelining, _CLASSES[schedule])


def check_split_backward(schedule: str, model: torch.nn.Module) -> None:
    """Check that torch can split the backward pass of `model`, as `zero_bubble` does.

    torch 2.11, 2.12 and 2.13 crash with group normalization: they compute gradients from a freed graph.

    Raises:
        ConfigError: with the key `parallel.schedule`, if torch would crash.
    """
    crashes = schedule == "zero_bubble" and torch.__version__ < "2.14"
    grouped = crashes and any(isinstance(module, torch.nn.GroupNorm) for module in model.modules())
    why = f"torch {torch.__version__} crashes when it splits the backward pass of group normalization"
    check(not grouped, "parallel.schedule", schedule, why, "another parallel.schedule, or install torch 2.14")
