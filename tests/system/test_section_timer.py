"""The clock, driven by hand: `now` is the time."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

import runner.system.section_timer
from runner.system.section_timer import Clock


class Hand:
    """A `time` module whose counter moves only when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def move(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def hand(monkeypatch: pytest.MonkeyPatch) -> Hand:
    hand = Hand()
    monkeypatch.setattr(runner.system.section_timer, "time", SimpleNamespace(perf_counter=lambda: hand.now))
    return hand


def test_times_are_exclusive_and_add_up_to_the_whole(hand: Hand) -> None:
    clock = Clock()
    hand.move(1)
    with clock.section("evaluate"):
        hand.move(2)
        with clock.section("data"):
            hand.move(4)
        hand.move(8)
    hand.move(16)
    assert clock.seconds() == {"other": 17, "evaluate": 10, "data": 4}
    assert sum(clock.seconds().values()) == hand.now - 100


def test_a_section_may_lie_within_itself(hand: Hand) -> None:
    clock = Clock()
    with clock.section("a"):
        hand.move(1)
        with clock.section("a"), clock.section("b"):
            hand.move(2)
        hand.move(4)
    hand.move(8)
    assert clock.seconds() == {"other": 8, "a": 5, "b": 2}
    assert clock.calls == {"a": 2, "b": 1}


def test_seconds_count_up_to_now_inside_a_section(hand: Hand) -> None:
    clock = Clock()
    with clock.section("a"):
        hand.move(1)
        assert clock.seconds()["a"] == 1
        hand.move(2)
        assert clock.seconds()["a"] == 3
    hand.move(4)
    assert clock.seconds() == {"other": 4, "a": 3}


def test_an_error_leaves_its_section(hand: Hand) -> None:
    clock = Clock()

    def fail() -> None:
        with clock.section("a"):
            hand.move(1)
            raise ValueError("here")

    with pytest.raises(ValueError):
        fail()
    hand.move(2)
    assert clock.seconds() == {"other": 2, "a": 1}


def test_reset_forgets_times_calls_and_synchronization(hand: Hand) -> None:
    clock, waits = Clock(), []
    clock.reset(lambda: waits.append(hand.now))
    with clock.section("a"):
        hand.move(1)
    assert waits == [100, 101]
    clock.reset()
    hand.move(2)
    with clock.section("b"):
        pass
    assert clock.seconds() == {"other": 2, "b": 0}
    assert clock.calls == {"b": 1}
    assert waits == [100, 101]


def test_the_wait_for_the_device_counts_for_the_section_that_asked(hand: Hand) -> None:
    """A device that has 10 seconds of work queued by `forward` is waited for before the time is read."""
    clock, queued = Clock(), [0.0]

    def wait() -> None:
        hand.move(queued[0])
        queued[0] = 0.0

    clock.reset(wait)
    with clock.section("forward"):
        hand.move(1)
        queued[0] = 10.0
    with clock.section("backward"):
        hand.move(2)
    assert clock.seconds() == {"other": 0, "forward": 11, "backward": 2}


def test_real_time_adds_up() -> None:
    clock, start = Clock(), time.perf_counter()
    for _ in range(100):
        with clock.section("a"), clock.section("b"):
            pass
    total, elapsed = sum(clock.seconds().values()), time.perf_counter() - start
    assert 0 < total <= elapsed + 1e-9
    assert total == pytest.approx(elapsed, abs=1e-3)
