"""Tests of the section timer, with a fake clock."""

from contextlib import suppress

import pytest
from helpers.clock import FakeClock

import runner.system.section_timer
from runner.system.section_timer import SectionTimer


@pytest.fixture
def clock(monkeypatch) -> FakeClock:
    clock = FakeClock()
    monkeypatch.setattr(runner.system.section_timer, "time", clock)
    return clock


def test_times_are_exclusive_and_add_up_to_the_total_even_after_an_error(clock):
    timer = SectionTimer()
    clock.now += 1
    with suppress(ValueError), timer.section("evaluate"):
        clock.now += 2
        with timer.section("data"):
            clock.now += 4
        clock.now += 8
        raise ValueError
    clock.now += 16
    with timer.section("log"):
        clock.now += 32
    assert timer.seconds() == {"other": 17, "evaluate": 10, "data": 4, "log": 32}
    assert sum(timer.seconds().values()) == clock.now - 1000
    assert (timer.spent("data"), timer.spent("never entered")) == (4, 0)
    assert timer.paused() == 42, "evaluation and logs do not count as training"


def test_waiting_for_the_device_counts_toward_the_section_that_queued_the_work(clock):
    """`forward` queues 10 seconds of work on the device, which the timer waits for before it reads the clock."""
    timer, queued = SectionTimer(), [0.0]

    def wait() -> None:
        clock.now += queued[0]
        queued[0] = 0.0

    timer.reset(wait)
    with timer.section("forward"):
        clock.now += 1
        queued[0] = 10.0
    with timer.section("backward"):
        clock.now += 2
    assert timer.seconds() == {"other": 0, "forward": 11, "backward": 2}
