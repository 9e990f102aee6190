"""The bubble of a pipeline under each schedule and number of micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from runner.parallel.pipelining.micro_batches import MicrobatchConstraint, divisors
from runner.parallel.pipelining.partition import balanced
from runner.parallel.pipelining.simulation import simulate
from runner.parallel.pipelining.timeline import bubble

BlockTimes = Callable[[int], Sequence[float]]

_FORWARD = 1 / 3
"""The part of a block's time that is its forward pass: each of the two gradients takes about as long."""


def bubbles(schedules: Sequence[str], num_workers: int, samples: int, times: BlockTimes) -> list[dict[str, Any]]:
    """Return the bubble for each number of micro-batches, the fewest first.

    Args:
        schedules: the schedules; with `engine=streams` only `gpipe`.
        num_workers: number of processes or, with `engine=streams`, of stages.
        samples: number of samples in one pass through the pipeline.
        times: function that returns the time of each block for a number of samples, in any unit.

    Returns:
        A list of dicts with the keys `split_size` and `num_micro_batches`, and one key for each schedule. Its value is
        a dict with the `bubble`, the idle share of the processes' time, and the `time` from the start of the first
        computation to the end of the last one, in the unit of `times`; or None where the schedule does not work with so
        many micro-batches or stages.
    """
    return [
        {"split_size": samples // count, "num_micro_batches": count}
        | {name: _simulated(name, num_workers, count, times(samples // count)) for name in schedules}
        for count in divisors(samples)
    ]


def _simulated(schedule: str, num_workers: int, num_micros: int, blocks: Sequence[float]) -> dict[str, float] | None:
    num_stages = num_workers * (2 if schedule == "interleaved_1f1b" else 1)
    if num_stages > len(blocks) or MicrobatchConstraint(schedule, num_stages, num_workers).violation(num_micros):
        return None
    bounds = [0, *balanced(blocks, num_stages), len(blocks)]
    stages = [sum(blocks[start:stop]) for start, stop in pairwise(bounds)]

    def seconds(stage: int, kind: str) -> float:
        whole = kind == "backward" and schedule != "zero_bubble"
        return stages[stage] * (1 - _FORWARD if whole else _FORWARD)

    found = bubble(simulate(schedule, num_stages, num_workers, num_micros, seconds), num_workers)
    return {"bubble": found.share, "time": found.seconds}
