"""Tests of functions that take turns: what each of them sees of the process."""

import io
import logging
import sys
from functools import partial
from typing import Any

import pytest
from helpers.compose import build_composed_run

from runner.system.section_timer import timer
from runner.system.signals import StopRequest
from runner.system.turns import Seat, own_seat
from runner.tracking.log_file import LogFile


def run(seats: list[Seat]) -> None:
    """Give turns, in which each function gets the sum of what all have asked."""
    while seats := [seat for seat in seats if seat.code is None]:
        for seat in seats:
            seat.go_on()
        total = sum(seat.request for seat in seats if seat.request is not None)
        for seat in seats:
            seat.answer(total)


def test_each_function_prints_logs_and_times_for_itself(tmp_path):
    log, given = logging.getLogger("runner.test"), list[list[int]]()

    def function(number: int) -> int:
        answers, seat = [], own_seat()
        assert seat is not None
        (tmp_path / str(number)).mkdir()
        with LogFile(tmp_path / str(number)), timer.section(f"section {number}"):
            for step in range(2):
                print(f"{number} at {step}")
                log.info("%d logs %d", number, step)
                answers.append(seat.ask(number + step))
        given.append(answers)
        timer.section("end").__enter__()
        assert [name for name in timer.calls if name.startswith("section")] == [f"section {number}"]
        return number

    consoles, before = (
        [io.StringIO(), io.StringIO()],
        (sys.stdout, vars(timer), list(logging.getLogger("runner").handlers)),
    )
    seats = [Seat(i, lambda i=i: function(10 * i), console) for i, console in enumerate(consoles)]
    run(seats)
    assert [seat.code for seat in seats] == [0, 10]
    assert given == [[10, 12], [10, 12]]
    for number, console in zip((0, 10), consoles, strict=True):
        lines = [f"{number} at 0", f"{number} logs 0", f"{number} at 1", f"{number} logs 1"]
        assert console.getvalue().splitlines() == lines
        assert [line.rpartition(": ")[2] for line in (tmp_path / str(number) / "log.txt").read_text().splitlines()] == [
            f"{number} logs 0",
            f"{number} logs 1",
        ]
    assert (sys.stdout, vars(timer), logging.getLogger("runner").handlers) == before


def test_one_function_is_asked_to_stop_and_one_that_has_not_begun_does_not_begin():
    def function() -> int:
        with StopRequest() as stop:
            while not stop.received:
                seat.ask(1)
        return len(stop.received)

    seat, other = Seat(0, function), Seat(1, function)
    seat.go_on()
    for each in (seat, other):
        each.stop("SIGTERM")
    assert (seat.code, other.code) == (None, 75)
    seat.go_on()
    assert seat.code == len("SIGTERM")


def test_an_error_of_a_function_reaches_the_one_that_gives_turns():
    seat = Seat(0, lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        seat.go_on()
    assert seat.code == 1


def test_functions_share_samples_in_memory_of_the_same_options_only():
    common, found = dict[str, Any](), list[Any]()

    def main(*words: str) -> int:
        workload = build_composed_run(*words).workload
        workload.prepare()
        found.append(workload.train)
        return 0

    tiny = ("model=tiny", "data.size=8")
    for words in (tiny, (*tiny, "seed=1"), (*tiny, "data.size=16")):
        seat = Seat(0, partial(main, *words), common=common)
        seat.go_on()
        assert seat.code == 0
    main(*tiny)
    first, second, other, alone = found
    assert first is second
    assert len({*map(id, (first, other, alone))}) == 3
    assert first.inputs.equal(alone.inputs)
