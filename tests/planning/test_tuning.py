"""Tests of the search for the fastest candidate, with simulated trials of known speed and a simulated clock."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import pytest

from runner.planning.candidates import BITWISE, LAST_BITS, SIXTEEN_BITS, STATISTICS, Candidate, Overrides
from runner.planning.trial import Burst, TooLateError, TrialError
from runner.planning.tuning import Row, Search, as_plain, ratio


class SimulatedMachine:
    """A simulated machine on which the steps of each candidate take a known time, multiplied by noise and `slowness`.

    Args:
        seconds: a dict from the overrides of each candidate, joined by spaces, to the seconds of one step.
        noise: standard deviation of the logarithm of a burst's time.
        startup: a dict from the overrides of a candidate, joined by spaces, to the seconds until its first step is
            done. Candidates that are not in the dict need one second.
        slowness: function that takes the time of the clock and returns the factor by which step times are multiplied.
    """

    def __init__(
        self,
        seconds: dict[str, float],
        noise: float = 0.0,
        startup: dict[str, float] | None = None,
        slowness: Callable[[float], float] = lambda now: 1.0,
    ):
        self.seconds, self.noise, self.startup, self.slowness = seconds, noise, startup or {}, slowness
        self.now, self.random, self.running = 0.0, random.Random(0), 0
        self.trained: dict[str, float] = {}
        self.patience: list[float] = []

    def start(self, candidate: Candidate, seconds: float) -> SimulatedTrial:
        return SimulatedTrial(self, " ".join(candidate.overrides), seconds)

    def search(self, budget: float = 60.0, **options: object) -> Search:
        return Search(self.start, budget, clock=lambda: self.now, **options)  # type: ignore[arg-type]


class SimulatedTrial:
    """A trial on a `SimulatedMachine`."""

    def __init__(self, machine: SimulatedMachine, name: str, seconds: float):
        self.machine, self.name = machine, name
        self.startup_seconds = machine.startup.get(name, 1.0)
        if self.startup_seconds > seconds:
            machine.now += seconds
            raise TrialError("no step")
        machine.now += self.startup_seconds
        machine.running += 1

    def steps(self, count: int, seconds: float) -> Burst:
        machine = self.machine
        machine.patience.append(seconds)
        each = machine.seconds[self.name] * machine.slowness(machine.now)
        each *= machine.random.lognormvariate(0.0, machine.noise)
        if each < 0:
            raise TrialError("MemoryError: no memory")
        machine.now += count * each
        machine.trained[self.name] = machine.trained.get(self.name, 0.0) + count * each
        return Burst(each, 1e6)

    def close(self, kill: bool = False) -> None:
        self.machine.running -= 1


def candidates(names: Iterable[str], results: str = LAST_BITS) -> list[Candidate]:
    return [Candidate(tuple(name.split()), None, results if name else BITWISE) for name in names]


def search_all(search: Search, layouts: Iterable[Candidate], *groups: Any, **options: Any) -> Row:
    """Search `layouts`, the first of which is the default, and then further groups; return the chosen row."""
    default, *others = layouts
    return search.run(default, [lambda overrides: iter(others), *groups], **options)


def changes(*options: str) -> list[Callable[[Overrides], Iterator[Candidate]]]:
    """Return one function for each option. The function yields a candidate with the option added to the overrides."""

    def add(option: str, overrides: Overrides) -> Iterator[Candidate]:
        yield Candidate((*overrides, option), None, LAST_BITS)

    return [partial(add, option) for option in options]


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.1])
def test_the_fastest_candidate_is_found(noise: float) -> None:
    seconds = {"": 0.010, "a": 0.012, "b": 0.007, "c": 0.011, "d": 0.030, "e": 0.0072, "f": 0.009}
    machine = SimulatedMachine(seconds, noise)
    chosen = search_all(machine.search(), candidates(seconds))
    assert seconds[" ".join(chosen.overrides)] <= 1.03 * min(seconds.values())
    assert machine.running == 0


def test_candidates_are_compared_within_rounds() -> None:
    """The machine becomes five times as slow during the search; the last candidate, the fastest, is still chosen."""
    seconds = {"": 0.010, "a": 0.012, "b": 0.011, "c": 0.009}
    machine = SimulatedMachine(seconds, 0.02, slowness=lambda now: 1.0 if now < 4 else 5.0)
    assert search_all(machine.search(), candidates(seconds)).overrides == ("c",)


def test_slow_candidates_cost_little_time() -> None:
    seconds = {"": 0.010, "fast": 0.005, **{f"slow{i}": 0.050 for i in range(10)}}
    machine = SimulatedMachine(seconds, 0.02)
    search_all(machine.search(), candidates(seconds))
    assert max(machine.trained[f"slow{i}"] for i in range(10)) < machine.trained["fast"] / 2


def test_candidates_that_resemble_a_slow_one_are_not_measured() -> None:
    pipelines = [f"parallel=pipeline parallel.processes=2 parallel.split_size={size}" for size in (16, 8, 4)]
    others = ["parallel=ddp parallel.processes=2", "parallel=pipeline parallel.processes=4"]
    seconds = {"": 0.010, **dict.fromkeys(pipelines, 0.050), **dict.fromkeys(others, 0.011)}
    search = SimulatedMachine(seconds).search()
    search_all(search, candidates(seconds))
    found = {" ".join(row.overrides): row.status for row in search.rows}
    assert [found[name] for name in pipelines] == ["measured", "dropped", "dropped"]
    assert [found[name] for name in others] == ["measured", "measured"]


def test_the_budget_is_kept() -> None:
    seconds = {"": 0.010, **{f"c{i}": 0.010 + 0.0001 * i for i in range(30)}}
    machine = SimulatedMachine(seconds, 0.05, startup={f"c{i}": 4.0 for i in range(30)})
    search = machine.search(budget=30.0)
    search_all(search, candidates(seconds))
    assert machine.now < 33
    assert "the budget is spent" in {row.reason for row in search.rows}


def test_a_candidate_within_the_noise_of_the_default_is_not_chosen() -> None:
    machine = SimulatedMachine({"": 0.0100, "a": 0.0099, "b": 0.0101}, 0.05)
    search = machine.search()
    assert search_all(search, candidates(["", "a", "b"])) is search.default
    assert ratio(search.rows[1], search.default).is_clear is False


def test_of_equally_fast_candidates_the_one_with_the_shortest_startup_is_chosen() -> None:
    machine = SimulatedMachine({"": 0.010, "compiled": 0.00699, "plain": 0.007}, 0.02, startup={"compiled": 8.0})
    assert search_all(machine.search(), candidates(["", "compiled", "plain"])).overrides == ("plain",)


def test_options_are_added_to_the_fastest_candidate() -> None:
    seconds = {"": 0.010, "a": 0.008, "a x": 0.009, "a y": 0.006, "a y z": 0.005}
    machine = SimulatedMachine(seconds, 0.02)
    search = machine.search()
    assert search_all(search, candidates(["", "a"]), *changes("x", "y", "z")).overrides == ("a", "y", "z")


def test_candidates_whose_effect_is_not_allowed_are_not_tried() -> None:
    machine = SimulatedMachine({"": 0.010, "bf16": 0.001, "ddp": 0.002})
    layouts = [*candidates([""]), *candidates(["bf16"], SIXTEEN_BITS), *candidates(["ddp"], STATISTICS)]
    search = machine.search()
    assert search_all(search, layouts) is search.default
    assert [row.status for row in search.rows] == ["measured", "not tried", "not tried"]
    search = machine.search(allowed=[SIXTEEN_BITS])
    assert search_all(search, layouts).overrides == ("bf16",)


def test_a_failed_candidate_has_a_row_with_the_reason() -> None:
    machine = SimulatedMachine({"": 0.010, "broken": -1.0, "b": 0.007})
    layouts = [*candidates(["", "broken", "b"]), Candidate(("odd",), None, refusal="it does not divide")]
    search = machine.search()
    assert search_all(search, layouts).overrides == ("b",)
    found = {" ".join(row.overrides): (row.status, row.reason) for row in search.rows}
    assert found["broken"] == ("crashed", "MemoryError: no memory")
    assert found["odd"] == ("refused", "it does not divide")
    assert machine.running == 0


def test_a_default_that_fails_later_ends_the_search() -> None:
    machine = SimulatedMachine({"": 0.010, "a": 0.005}, slowness=lambda now: -1.0 if now > 4 else 1.0)
    with pytest.raises(TrialError, match="no memory"):
        search_all(machine.search(), candidates(["", "a"]))
    assert machine.running == 0


def test_a_budget_that_the_preparation_has_spent_ends_the_search() -> None:
    machine = SimulatedMachine({"": 0.010, "a": 0.005})
    with pytest.raises(TooLateError):
        search_all(machine.search(budget=-1.0), candidates(["", "a"]))
    assert machine.trained == {}


def test_the_timeout_of_a_burst_is_about_a_minute() -> None:
    machine = SimulatedMachine({"": 0.001, "a": 0.0005})
    search_all(machine.search(), candidates(["", "a"]))
    assert max(machine.patience) < 66, "a minute, and ten times the 0.4 s of a burst"


def test_a_run_that_cannot_train_ends_the_search() -> None:
    with pytest.raises(TrialError, match="no memory"):
        search_all(SimulatedMachine({"": -1.0}).search(), candidates([""]))


def test_waiting_trials_are_ended_to_free_memory() -> None:
    seconds = {"": 0.010, "a": 0.008, "b": 0.009, "c": 0.007}
    machine = SimulatedMachine(seconds)
    search = machine.search(has_room=lambda candidate, default, waiting: len(waiting) < 2)
    assert search_all(search, candidates(seconds)).overrides == ("c",)
    assert machine.running == 0
    search = machine.search(has_room=lambda candidate, *rows: not candidate.overrides)
    search_all(search, candidates(["", "a"]))
    assert (search.rows[1].status, search.rows[1].reason) == ("dropped", "it does not fit into memory")


def test_budget_for_can_end_the_search_after_the_default() -> None:
    machine = SimulatedMachine({"": 0.010, "a": 0.001})
    search = machine.search()
    assert search_all(search, candidates(["", "a"]), budget_for=lambda row: 0.0) is search.default
    assert len(search.rows) == 1
    search = machine.search(budget=2.0)
    assert search_all(search, candidates(["", "a"]), budget_for=lambda row: 1000 * row.step_seconds).overrides == ("a",)


def test_rows_as_plain_values() -> None:
    machine = SimulatedMachine({"": 0.010, "a": 0.005}, startup={"a": 11.0})
    search = machine.search()
    chosen = search_all(search, [*candidates(["", "a"]), *candidates(["bf16"], SIXTEEN_BITS)])
    plain = as_plain(search, chosen, samples=64)
    assert (plain["chosen"], plain["speedup"], plain["noise"]) == (["a"], pytest.approx(2.0), pytest.approx(0.0))
    fast, default, skipped = plain["rows"]
    assert fast["samples_per_second"] == pytest.approx(64 / 0.005)
    # A ratio of step times of 0.5 ± 0.01 (the least uncertainty) is a speedup from 1 / 0.51 to 1 / 0.49.
    assert fast["uncertainty"] == pytest.approx((1 / 0.49 - 1 / 0.51) / 2, rel=1e-3)
    assert fast["break_even_steps"] == pytest.approx(10.0 / (0.010 - 0.005))
    assert (default["speedup"], default["break_even_steps"]) == (1.0, None)
    assert (skipped["status"], skipped["speedup"]) == ("not tried", None)


def test_a_ratio_has_an_uncertainty() -> None:
    one, other = (Row(candidate) for candidate in candidates(["a", "b"]))
    one.bursts, other.bursts = {1: 1.0, 2: 1.1, 3: 0.9, 4: 1.0}, {2: 1.0, 3: 1.0, 4: 1.0, 5: 9.0}
    value, uncertainty = ratio(one, other)
    assert value == pytest.approx(1.0)
    assert uncertainty == pytest.approx(2 * 1.2533 * 1.4826 * 0.1 / 3**0.5)
