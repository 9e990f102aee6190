"""The schedules of a pipeline: the order in which each of its workers computes the forward and backward passes."""

from __future__ import annotations

from typing import Any

import torch

from runner.config.errors import check
from runner.system.torch_private import pipeline_actions

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

Action = tuple[int, str, int]
"""A computation, as a tuple (stage, kind, micro-batch); the kind is one of those in `Span`."""


def schedule_class(schedule: str) -> Any:
    """Return the class of `torch.distributed.pipelining` that implements `schedule`."""
    from torch.distributed import pipelining  # imported here: it takes half a second

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


def actions(schedule: str, num_stages: int, num_workers: int, num_micros: int) -> list[list[Action]]:
    """Return a list of computations for each worker, in the order in which the worker makes them.

    Args:
        schedule: one of `SCHEDULES`.
        num_stages: number of stages; stage i is on worker i modulo `num_workers`.
        num_workers: number of workers.
        num_micros: number of micro-batches.
    """
    micros = range(num_micros)
    if schedule == "gpipe":
        return [[(stage, kind, m) for kind in ("forward", "backward") for m in micros] for stage in range(num_stages)]
    if schedule == "1f1b":
        return [_one_forward_one_backward(stage, num_stages, num_micros) for stage in range(num_stages)]
    kinds = {"F": "forward", "B": "backward", "I": "backward", "W": "weights"}
    order = pipeline_actions(schedule_class(schedule), num_stages, num_workers, num_micros)
    return [[(stage, kinds[kind], micro) for stage, kind, micro in own] for own in order]


def _one_forward_one_backward(stage: int, num_stages: int, num_micros: int) -> list[Action]:
    """Return the computations of a stage under `1f1b`, in order."""
    ahead = min(num_micros, num_stages - stage)
    own = [(stage, "forward", micro) for micro in range(ahead)]
    for micro in range(num_micros):
        own.append((stage, "backward", micro))
        if micro + ahead < num_micros:
            own.append((stage, "forward", micro + ahead))
    return own
