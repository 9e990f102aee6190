"""Tests of the section timer, with a fake clock."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import runner.system.section_timer
from runner.system.section_timer import SectionTimer


class FakeClock:
    """A fake clock, which advances only when `advance` is called."""

    def __init__(self) -> None:
        self.now = 100.0

    def advance(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    clock = FakeClock()
    monkeypatch.setattr(runner.system.section_timer, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    return clock


def test_times_are_exclusive_and_add_up_to_the_total(clock: FakeClock) -> None:
    timer = SectionTimer()
    clock.advance(1)
    with timer.section("evaluate"):
        clock.advance(2)
        with timer.section("data"):
            clock.advance(4)
        clock.advance(8)
    clock.advance(16)
    assert timer.seconds() == {"other": 17, "evaluate": 10, "data": 4}
    assert sum(timer.seconds().values()) == clock.now - 100


def test_an_error_ends_its_section(clock: FakeClock) -> None:
    timer = SectionTimer()

    def fail() -> None:
        with timer.section("a"):
            clock.advance(1)
            raise ValueError("here")

    with pytest.raises(ValueError):
        fail()
    clock.advance(2)
    assert timer.seconds() == {"other": 2, "a": 1}


def test_reset_clears_times_calls_and_synchronization(clock: FakeClock) -> None:
    timer, waits = SectionTimer(), []
    timer.reset(lambda: waits.append(clock.now))
    with timer.section("a"):
        clock.advance(1)
    assert waits == [100, 101]
    timer.reset()
    clock.advance(2)
    with timer.section("b"):
        pass
    assert timer.seconds() == {"other": 2, "b": 0}
    assert timer.calls == {"b": 1}
    assert waits == [100, 101]


def test_waiting_for_the_device_counts_toward_the_section_that_queued_the_work(clock: FakeClock) -> None:
    """`forward` queues 10 seconds of work on the device, which the timer waits for before it reads the clock."""
    timer, queued = SectionTimer(), [0.0]

    def wait() -> None:
        clock.advance(queued[0])
        queued[0] = 0.0

    timer.reset(wait)
    with timer.section("forward"):
        clock.advance(1)
        queued[0] = 10.0
    with timer.section("backward"):
        clock.advance(2)
    assert timer.seconds() == {"other": 0, "forward": 11, "backward": 2}


def test_paused_counts_only_sections_that_are_not_training(clock: FakeClock) -> None:
    timer = SectionTimer()
    for seconds, name in enumerate(("data", "log", "evaluate", "optimizer", "checkpoint"), start=1):
        with timer.section(name):
            clock.advance(seconds)
    assert timer.paused() == 2 + 3 + 5
    assert timer.spent("data") == 1
    assert timer.spent("never entered") == 0
