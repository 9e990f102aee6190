"""The orders of a pipeline's computations, beside those of torch."""

from __future__ import annotations

from runner.parallel.pipelining.schedules import SCHEDULES, actions, schedule_class


def test_one_forward_one_backward_is_what_torch_does() -> None:
    """`Schedule1F1B._step_microbatches`: as many forward passes ahead as there are stages from here to the end."""
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


def test_each_schedule_has_a_class_of_torch() -> None:
    names = [schedule_class(schedule).__name__ for schedule in SCHEDULES]
    assert names == ["ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble"]
