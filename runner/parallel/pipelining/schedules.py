"""The schedules of a pipeline, and the number of micro-batches into which it splits a batch."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from runner.config.errors import ConfigError

SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble")
"""The values of `parallel.schedule`."""

ONE_STAGE_EACH = ("gpipe", "1f1b")
"""The schedules with exactly one stage per worker."""

_PER_STAGE = 4
"""Default number of micro-batches per stage: equal stages are then idle for less than 20 % of a step."""


class MicrobatchConstraint(NamedTuple):
    """The requirements of a schedule on the number of micro-batches."""

    schedule: str
    num_stages: int
    num_processes: int

    def violation(self, count: int) -> str:
        """Return why the schedule does not support `count` micro-batches; empty if it does."""
        if self.schedule == "1f1b" and count < self.num_stages:
            return f"1f1b needs at least as many micro-batches as stages: {self.num_stages}"
        if self.schedule in ("interleaved_1f1b", "zero_bubble"):
            processes = self.num_processes
            if count < processes:
                return f"{self.schedule} needs at least as many micro-batches as processes: {processes}"
            rounds = count // processes
            if count % rounds:
                return f"{self.schedule} needs a number of micro-batches that is divisible by {rounds}"
        return ""


def num_micro_batches(samples: int, split_size: int | None, count: int | None, constraint: MicrobatchConstraint) -> int:
    """Return the number of micro-batches into which `samples` are split; by default, about four per stage.

    Args:
        samples: number of samples in one pass through the pipeline.
        split_size: requested number of samples per micro-batch; None if not specified.
        count: requested number of micro-batches; None if not specified.
        constraint: the requirements of the schedule.

    Raises:
        ConfigError: if this is impossible; the error names the nearest possible numbers.
    """
    possible = [number for number in divisors(samples) if not constraint.violation(number)]
    if not possible:
        why = f"{constraint.violation(samples)}, and a batch of {samples} samples cannot be split like that"
        raise ConfigError(
            "parallel.schedule", constraint.schedule, why, "a larger batch_size, or parallel.schedule=gpipe"
        )
    if split_size is None and count is None:
        # At least two, of at least two samples: one micro-batch overlaps with nothing, and one sample has no variance.
        fitting = [number for number in possible if 1 < number <= samples // 2] or possible
        wanted = _PER_STAGE * constraint.num_stages
        return min(fitting, key=lambda number: (abs(number - wanted), -number))
    if split_size is None:
        assert count is not None
        _check(samples, count, "num_micro_batches", count, possible, constraint)
        return count
    sizes = sorted(samples // number for number in possible)
    _check(samples, samples / split_size, "split_size", split_size, sizes, constraint)
    number = samples // split_size
    if count not in (None, number):
        why = f"split_size={split_size} makes {number} micro-batches of {samples} samples"
        raise ConfigError("parallel.num_micro_batches", count, why, "name one of the two")
    return number


def _check(
    samples: int, count: float, key: str, got: int, possible: list[int], constraint: MicrobatchConstraint
) -> None:
    together = f"the {samples} samples that go through together (batch_size / accumulation.steps)"
    if count < 1 or count > samples:
        why = f"there are no more than {together.removeprefix('the ')}"
    elif got not in possible and samples % got:
        why = f"it does not divide {together}"
    else:
        why = constraint.violation(int(count))
    if why:
        below = [number for number in possible if number < got][-1:]
        above = [number for number in possible if number > got][:1]
        nearest = " or ".join(f"parallel.{key}={number}" for number in (*below, *above))
        raise ConfigError(f"parallel.{key}", got, why, f"the nearest that can be: {nearest}")


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
