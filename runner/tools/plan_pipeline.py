"""The bubble of a pipeline under each schedule and number of micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from runner.parallel.pipeline import Pipeline
from runner.parallel.pipelining.micro_batches import MicrobatchConstraint, divisors
from runner.parallel.pipelining.partition import balanced
from runner.parallel.pipelining.simulation import simulate
from runner.parallel.pipelining.timeline import bubble

SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble")
_FORWARD = 1 / 3
"""The part of a block's time that is its forward pass: each of the two gradients takes about as long."""


def bubbles(mode: Pipeline, num_workers: int, samples: int, blocks: Sequence[float]) -> list[dict[str, Any]]:
    """Return the bubble for each number of micro-batches, the fewest first.

    Args:
        mode: the pipeline.
        num_workers: number of processes or, with `engine=streams`, of stages.
        samples: number of samples in one pass through the pipeline.
        blocks: the time of each block of the network, in any unit.

    Returns:
        A list of dicts with the keys `split_size` and `num_micro_batches`, and one key for each schedule: the idle
        share of the processes' time, or None where the schedule does not work with so many micro-batches or stages.
    """
    schedules = SCHEDULES if mode.engine == "processes" else SCHEDULES[:1]
    return [
        {"split_size": samples // count, "num_micro_batches": count}
        | {name: _share(name, num_workers, count, blocks) for name in schedules}
        for count in divisors(samples)
    ]


def _share(schedule: str, num_workers: int, num_micros: int, blocks: Sequence[float]) -> float | None:
    num_stages = num_workers * (2 if schedule == "interleaved_1f1b" else 1)
    if num_stages > len(blocks) or MicrobatchConstraint(schedule, num_stages, num_workers).violation(num_micros):
        return None
    times = stage_times(blocks, [0, *balanced(blocks, num_stages), len(blocks)])

    def seconds(stage: int, kind: str) -> float:
        whole = kind == "backward" and schedule != "zero_bubble"
        return times[stage] / num_micros * (1 - _FORWARD if whole else _FORWARD)

    return bubble(simulate(schedule, num_stages, num_workers, num_micros, seconds), num_workers).share


def stage_times(blocks: Sequence[float], bounds: Sequence[int]) -> list[float]:
    """Return the time of each stage, given those of its blocks and the indices at which the stages begin and end."""
    return [sum(blocks[start:stop]) for start, stop in pairwise(bounds)]
