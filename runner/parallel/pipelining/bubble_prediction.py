"""Predictions of the bubble, the idle share of a pipeline, for each schedule and number of micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from runner.parallel.pipelining.micro_batches import MicrobatchConstraint, divisors
from runner.parallel.pipelining.partition import balanced
from runner.parallel.pipelining.schedules import ONE_STAGE_EACH
from runner.parallel.pipelining.simulation import simulate
from runner.parallel.pipelining.timeline import bubble

BlockTimes = Callable[[int], Sequence[float]]

_FORWARD = 1 / 3
"""The fraction of a block's time that its forward pass takes. The gradient of the inputs takes another third, and the
gradient of the weights the last third.
"""


def bubbles(
    schedules: Sequence[str],
    num_workers: int,
    samples: int,
    times: BlockTimes,
    num_stages: int | None = None,
    cuts: Sequence[int] | None = None,
) -> list[dict[str, Any]]:
    """Return the predicted bubble for each number of micro-batches that divides `samples`, in increasing order.

    Args:
        schedules: names of the schedules; with `engine=streams` only `gpipe`.
        num_workers: number of processes or, with `engine=streams`, of stages.
        samples: number of samples in one pass through the pipeline.
        times: function that takes a number of samples and returns a sequence with the time of each block, in any unit.
        num_stages: number of stages; None for one stage per worker, or two with `interleaved_1f1b`.
        cuts: index of the first block of every stage except the first; None for stages of about the same time.

    Returns:
        A list of dicts with the keys `split_size` and `num_micro_batches`, and one key for each schedule. The value for
        a schedule is None if the schedule does not support the number of micro-batches or stages, or if there are
        fewer blocks than stages. Otherwise, the value is a dict with these keys:

        - `bubble`: the idle share of the workers' time;
        - `time`: the time from the start of the first computation to the end of the last one, in the unit of `times`;
        - `rounds`: v·m + p − 1 for p workers with v stages each and m micro-batches. For all schedules except
          `zero_bubble`, this is the time of an idealized pipeline, in which each stage takes one unit of time for the
          forward and backward pass of a micro-batch.
    """
    return [
        {"split_size": samples // count, "num_micro_batches": count}
        | {name: _simulated(name, num_workers, count, times(samples // count), num_stages, cuts) for name in schedules}
        for count in divisors(samples)
    ]


def _simulated(
    schedule: str,
    num_workers: int,
    num_micros: int,
    blocks: Sequence[float],
    asked_stages: int | None,
    cuts: Sequence[int] | None,
) -> dict[str, float] | None:
    least = num_workers * (2 if schedule == "interleaved_1f1b" else 1)
    num_stages = asked_stages or least
    most = least if schedule in ONE_STAGE_EACH else len(blocks)
    if num_stages % num_workers or not least <= num_stages <= min(most, len(blocks)):
        return None
    if MicrobatchConstraint(schedule, num_stages, num_workers).violation(num_micros):
        return None
    bounds = [0, *(balanced(blocks, num_stages) if cuts is None else cuts), len(blocks)]
    stages = [sum(blocks[start:stop]) for start, stop in pairwise(bounds)]

    def seconds(stage: int, kind: str) -> float:
        whole = kind == "backward" and schedule != "zero_bubble"
        return stages[stage] * (1 - _FORWARD if whole else _FORWARD)

    found = bubble(simulate(schedule, num_stages, num_workers, num_micros, seconds), num_workers)
    rounds = num_stages // num_workers * num_micros + num_workers - 1
    return {"bubble": found.share, "time": found.seconds, "rounds": rounds}
