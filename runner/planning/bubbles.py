"""The bubble of a pipeline, the idle share of its workers' time, by the formulas of the schedules."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from runner.parallel.pipelining.partition import balanced
from runner.parallel.pipelining.schedules import ONE_STAGE_EACH, divisors, violation


def bubbles(
    schedules: Sequence[str],
    num_workers: int,
    samples: int,
    costs: Sequence[float],
    num_stages: int | None = None,
    cuts: Sequence[int] | None = None,
) -> list[dict[str, Any]]:
    """Return the bubble for each number of micro-batches that divides `samples`, in increasing order.

    Args:
        schedules: names of the schedules.
        num_workers: number of processes or, with `engine=streams`, of stages.
        samples: number of samples in one pass through the pipeline.
        costs: the cost of a forward and backward pass of each block, in any unit.
        num_stages: number of stages; None for one stage per worker, or two with `interleaved_1f1b`.
        cuts: index of the first block of every stage except the first; None for stages of about the same cost.

    Returns:
        A list of dicts with `split_size`, `num_micro_batches`, and the bubble of each schedule: None if the schedule
        does not support the number of micro-batches or stages, or if there are fewer blocks than stages.
    """
    stages = {name: _stages(name, num_workers, costs, num_stages, cuts) for name in schedules}
    return [
        {"split_size": samples // count, "num_micro_batches": count}
        | {name: _bubble(name, num_workers, count, stages[name]) for name in schedules}
        for count in divisors(samples)
    ]


def _stages(
    schedule: str, num_workers: int, costs: Sequence[float], asked: int | None, cuts: Sequence[int] | None
) -> list[float]:
    """Return the cost of each stage; none if the schedule does not support the number of stages."""
    least = num_workers * (2 if schedule == "interleaved_1f1b" else 1)
    most = least if schedule in ONE_STAGE_EACH else len(costs)
    count = asked or least
    if count % num_workers or not least <= count <= min(most, len(costs)):
        return []
    bounds = [0, *(balanced(costs, count) if cuts is None else cuts), len(costs)]
    return [sum(costs[start:stop]) for start, stop in pairwise(bounds)]


def _bubble(schedule: str, num_workers: int, num_micros: int, stages: Sequence[float]) -> float | None:
    """Return the bubble of a schedule.

    The slowest worker computes without a pause, and waits only while the pipeline fills and drains. With equal stages,
    that takes p − 1 of m + p − 1 rounds for p workers and m micro-batches (Huang et al., GPipe, 2019, section 2.3).
    With v stages per worker, it takes 1 / v of that time (Narayanan et al., 2021, section 2.2). A zero-bubble schedule
    computes the gradients of weights meanwhile, so that a third of it remains (Qi et al., 2023, ZB-H1).
    """
    if not any(stages) or violation(schedule, len(stages), num_workers, num_micros):
        return None
    workers = [sum(stages[worker::num_workers]) for worker in range(num_workers)]
    parts = {"interleaved_1f1b": 1, "zero_bubble": 3}.get(schedule, 1) * (len(stages) // num_workers)
    filling = (sum(workers) - max(workers)) / parts
    return 1 - num_micros * sum(workers) / (num_workers * (num_micros * max(workers) + filling))
