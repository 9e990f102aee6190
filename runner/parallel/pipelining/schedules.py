"""The schedules of a pipeline: in which order its workers compute the forward and backward passes."""

from __future__ import annotations

from typing import Any

import torch

from runner.config.errors import ConfigError

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
    """Refuse `zero_bubble` with group normalization before torch 2.14, which computes gradients from a freed graph."""
    normalizes = any(isinstance(module, torch.nn.GroupNorm) for module in model.modules())
    if schedule == "zero_bubble" and torch.__version__ < "2.14" and normalizes:
        why = f"torch {torch.__version__} crashes when it splits the backward pass of group normalization"
        raise ConfigError("parallel.schedule", schedule, why, "another parallel.schedule, or install torch 2.14")
