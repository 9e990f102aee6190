"""Tests of the schedules: the order of the computations, and the class in torch."""

from __future__ import annotations

from runner.parallel.pipelining.schedules import SCHEDULES, actions, schedule_class


def test_1f1b_has_the_order_of_torch() -> None:
    """As in `Schedule1F1B._step_microbatches`, stage i of n computes n − i forward passes before its first backward."""
    assert actions("1f1b", 3, 3, 4)[1] == [
        (1, "forward", 0),
        (1, "forward", 1),
        (1, "backward", 0),
        (1, "forward", 2),
        (1, "backward", 1),
        (1, "forward", 3),
        (1, "backward", 2),
        (1, "backward", 3),
    ]


def test_each_schedule_has_a_class_in_torch() -> None:
    names = [schedule_class(schedule).__name__ for schedule in SCHEDULES]
    assert names == ["ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble"]
