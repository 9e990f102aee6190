"""How many micro-batches go through a pipeline together."""

from __future__ import annotations

import math
from typing import NamedTuple

from runner.config import ConfigError, check

_A_STAGE = 4
"""Micro-batches a stage, where nobody says: the bubble is then a fifth, and smaller ones compute less well."""


class Rule(NamedTuple):
    """What a schedule asks of the number of micro-batches."""

    schedule: str
    num_stages: int
    num_processes: int

    def refuses(self, count: int) -> str:
        """Why `count` micro-batches cannot be; empty where they can."""
        if self.schedule == "1f1b" and count < self.num_stages:
            return f"1f1b takes as many as there are stages or more: {self.num_stages}"
        if self.schedule in ("interleaved_1f1b", "zero_bubble"):
            processes = self.num_processes
            if count < processes:
                return f"{self.schedule} takes as many as there are processes or more: {processes}"
            rounds = count // processes
            if count % rounds:
                return f"{self.schedule} takes them in {rounds} equal rounds of {processes} or more"
        return ""


def micro_batches(samples: int, split_size: int | None, count: int | None, rule: Rule) -> int:
    """How many micro-batches `samples` are split into.

    Args:
        samples: that go through the pipeline together.
        split_size: samples in a micro-batch, as asked for.
        count: micro-batches, as asked for.

    Raises:
        ConfigError: when they cannot be; with the nearest that can.
    """
    possible = [number for number in divisors(samples) if not rule.refuses(number)]
    if not possible:
        why = f"{rule.refuses(samples)}, and a batch of {samples} samples cannot be split so"
        raise ConfigError("schedule", rule.schedule, why, "a larger batch_size, or parallel.schedule=gpipe")
    if split_size is None and count is None:
        # Several, of several samples: one alone has nothing to overlap with, and no variance to normalise by.
        fitting = [number for number in possible if 1 < number <= samples // 2] or possible
        wanted = _A_STAGE * rule.num_stages
        return min(fitting, key=lambda number: (abs(number - wanted), -number))
    if split_size is None:
        assert count is not None
        _check(samples, count, "num_micro_batches", count, possible, rule)
        return count
    sizes = sorted(samples // number for number in possible)
    _check(samples, samples / split_size, "split_size", split_size, sizes, rule)
    own = samples // split_size
    why = f"split_size={split_size} makes {own} micro-batches of {samples} samples"
    check(count in (None, own), "num_micro_batches", count, why, "name one of the two")
    return own


def _check(samples: int, count: float, key: str, got: int, possible: list[int], rule: Rule) -> None:
    """Refuse `got` as `key`, which makes `count` micro-batches, with the nearest of those that are `possible`."""
    together = f"the {samples} samples that go through together (batch_size / accumulation.steps)"
    if count < 1 or count > samples:
        why = f"there are no more than {together.removeprefix('the ')}"
    elif got not in possible and samples % got:
        why = f"it does not divide {together}"
    else:
        why = rule.refuses(int(count))
    below = [number for number in possible if number < got][-1:]
    above = [number for number in possible if number > got][:1]
    nearest = " or ".join(f"parallel.{key}={number}" for number in (*below, *above))
    check(not why, key, got, why, f"the nearest that can be: {nearest}")


def divisors(number: int) -> list[int]:
    """All of them, rising."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})
