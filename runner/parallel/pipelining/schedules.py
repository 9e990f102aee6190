"""The schedules of a pipeline, and the number of micro-batches into which it splits a batch."""

from __future__ import annotations

import math
from functools import partial
from typing import Literal, cast, get_args

import torch

from runner.config.errors import ConfigError, check

ScheduleName = Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"]
SCHEDULES: tuple[ScheduleName, ...] = get_args(ScheduleName)
"""The values of `parallel.schedule`."""

STAGES_EACH: dict[str, tuple[int, float]] = {
    "gpipe": (1, 1),
    "1f1b": (1, 1),
    "interleaved_1f1b": (2, math.inf),
    "zero_bubble": (1, math.inf),
}
"""The smallest and the largest number of stages per worker, of each schedule."""

_PER_STAGE = 4
"""Default number of micro-batches per stage: equal stages are then idle for less than 20 % of a step."""


def violation(schedule: str, num_stages: int, num_processes: int, count: int) -> str:
    """Return why `schedule` does not support `count` micro-batches; empty if it does."""
    if schedule == "1f1b" and count < num_stages:
        return f"1f1b needs at least as many micro-batches as stages: {num_stages}"
    if schedule in ("interleaved_1f1b", "zero_bubble"):
        if count < num_processes:
            return f"{schedule} needs at least as many micro-batches as processes: {num_processes}"
        if count % (rounds := count // num_processes):
            return f"{schedule} needs a number of micro-batches that is divisible by {rounds}"
    return ""


def num_micro_batches(
    samples: int, split_size: int | None, count: int | None, schedule: str, num_stages: int, num_processes: int
) -> int:
    """Return the number of micro-batches into which `samples` are split; by default, about four per stage.

    `split_size`, the number of samples per micro-batch, or `count`, that of micro-batches, is what the user asks for.

    Raises:
        ConfigError: if this is impossible; the error names the nearest possible numbers.
    """
    why_not = partial(violation, schedule, num_stages, num_processes)
    possible = [number for number in divisors(samples) if not why_not(number)]
    why = f"{why_not(samples)}, and a batch of {samples} samples cannot be split like that"
    check(bool(possible), "parallel.schedule", schedule, why, "a larger batch_size, or parallel.schedule=gpipe")
    if split_size is None and count is None:
        # At least two, of at least two samples: one micro-batch overlaps with nothing, and one sample has no variance.
        fitting = [number for number in possible if 1 < number <= samples // 2] or possible
        return min(fitting, key=lambda number: (abs(number - _PER_STAGE * num_stages), -number))
    sizes = sorted(samples // number for number in possible)
    for key, got, choices in (("split_size", split_size, sizes), ("num_micro_batches", count, possible)):
        if got is None or got in choices:
            continue
        why = f"it does not divide the {samples} samples that go through together (batch_size / accumulation.steps)"
        if samples % got == 0:
            why = why_not(samples // got if key == "split_size" else got)
        near = [*[each for each in choices if each < got][-1:], *[each for each in choices if each > got][:1]]
        nearest = " or ".join(f"parallel.{key}={each}" for each in near)
        raise ConfigError(f"parallel.{key}", got, why, f"the nearest that can be: {nearest}")
    found = samples // split_size if split_size is not None else cast(int, count)
    why = f"split_size={split_size} makes {found} micro-batches of {samples} samples"
    check(count in (None, found), "parallel.num_micro_batches", count, why, "name one of the two")
    return found


def divisors(number: int) -> list[int]:
    """Return all divisors of `number`, in increasing order."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def check_split_backward(schedule: str, model: torch.nn.Module) -> None:
    """Refuse `zero_bubble` with group normalization before torch 2.14, which computes gradients from a freed graph."""
    normalizes = any(isinstance(module, torch.nn.GroupNorm) for module in model.modules())
    if schedule == "zero_bubble" and torch.__version__ < "2.14" and normalizes:
        why = f"torch {torch.__version__} crashes when it splits the backward pass of group normalization"
        raise ConfigError("parallel.schedule", schedule, why, "another parallel.schedule, or install torch 2.14")
