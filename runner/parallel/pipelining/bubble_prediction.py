"""Predictions of the bubble, the idle share of a pipeline, for each schedule and number of micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from runner.parallel.pipelining.micro_batches import MicrobatchConstraint, divisors
from runner.parallel.pipelining.partition import balanced
from runner.parallel.pipelining.schedules import ONE_STAGE_EACH

BlockTimes = Callable[[int], Sequence[float]]


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
        | {name: _predicted(name, num_workers, count, times(samples // count), num_stages, cuts) for name in schedules}
        for count in divisors(samples)
    ]


def _predicted(
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
    time = pipeline_time(schedule, stages, num_workers, num_micros)
    busy = num_micros * sum(stages)
    rounds = num_stages // num_workers * num_micros + num_workers - 1
    return {"bubble": max(0.0, 1 - busy / (num_workers * time)) if time else 0.0, "time": time, "rounds": rounds}


def pipeline_time(schedule: str, stages: Sequence[float], num_workers: int, num_micros: int) -> float:
    """Return the time of a step if messages take no time.

    The slowest worker computes all micro-batches, and waits for the first to arrive and the last to return. With one
    stage per worker, this is exact for `gpipe` (Huang et al., 2019, section 2.3). `interleaved_1f1b` waits for
    p − 1 stages instead of workers (Narayanan et al., 2021, section 2.2), and `zero_bubble` fills two thirds of this
    time with gradients of weights (Qi et al., 2023, section 2).

    Args:
        schedule: name of the schedule.
        stages: time of the forward and backward pass of a micro-batch in each stage; stage i is on worker i modulo
            `num_workers`.
        num_workers: number of workers.
        num_micros: number of micro-batches.
    """
    if schedule in ONE_STAGE_EACH:
        return sum(stages) + (num_micros - 1) * max(stages)
    of_worker = [sum(stages[worker::num_workers]) for worker in range(num_workers)]
    idle = (num_workers - 1) * max(stages) * (1 / 3 if schedule == "zero_bubble" else 1)
    return num_micros * max(of_worker) + idle
