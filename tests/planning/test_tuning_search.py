"""Tests of the search for the fastest candidate, with simulated trials of known speed and a simulated clock."""

import random
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from runner.planning.candidates import BITWISE, LAST_BITS, SIXTEEN_BITS, STATISTICS, Candidate, OptionGroup, Overrides
from runner.planning.trial import BURST_SECONDS, Burst, TrialError
from runner.planning.tune import BUDGET_SPENT, Search, plain


class SimulatedMachine:
    """A simulated machine, where a step of each candidate takes `seconds`, its start one second or `startup`.

    `noise` is the standard deviation of the logarithm of a burst's time, `slowness` a factor by the time of the clock,
    and `results` the effect of candidates, by default `last bits`.
    """

    def __init__(
        self,
        seconds: dict[str, float],
        noise: float = 0.0,
        startup: dict[str, float] | None = None,
        slowness: Callable[[float], float] = lambda now: 1.0,
        results: dict[str, str] | None = None,
    ):
        self.seconds, self.noise, self.startup, self.slowness = seconds, noise, startup or {}, slowness
        self.results = {"": BITWISE} | (results or {})
        self.now, self.random, self.running = 0.0, random.Random(0), 0
        self.trained: dict[str, float] = {}

    def judge(self, overrides: Overrides) -> Candidate:
        name = " ".join(overrides)
        run: Any = SimpleNamespace(config={"name": name})
        return Candidate(overrides, run, self.results.get(name, LAST_BITS))

    def start(self, candidate: Candidate, seconds: float) -> Any:
        return SimulatedTrial(self, " ".join(candidate.overrides), seconds)

    def search(self, budget: float = 60.0, **options: Any) -> Search:
        return Search(self.judge, self.start, budget, clock=lambda: self.now, **options)


class SimulatedTrial:
    def __init__(self, machine: SimulatedMachine, name: str, seconds: float):
        self.machine, self.name = machine, name
        self.startup_seconds = machine.startup.get(name, 1.0)
        if self.startup_seconds > seconds:
            machine.now += seconds
            raise TrialError("no step", "dropped")
        machine.now += self.startup_seconds
        machine.running += 1

    def burst(self, seconds: float) -> Burst:
        machine = self.machine
        each = machine.seconds[self.name] * machine.slowness(machine.now)
        each *= machine.random.lognormvariate(0.0, machine.noise)
        if each < 0:
            raise TrialError("MemoryError: no memory")
        taken = max(BURST_SECONDS, each)
        machine.now += taken
        machine.trained[self.name] = machine.trained.get(self.name, 0.0) + taken
        return Burst(each, 1e6)

    def close(self) -> None:
        self.machine.running -= 1


def group(names: Iterable[str], name: str = "mode", weight: int = 1) -> OptionGroup:
    options: list[Overrides] = [tuple(each.split()) for each in names if each]
    return OptionGroup(name, lambda run: options, weight)


def chosen(search: Search, *groups: OptionGroup) -> str:
    return " ".join(search.run(groups).overrides)


def statuses(search: Search) -> dict[str, tuple[str, str]]:
    return {" ".join(row.overrides): (row.status, row.reason) for row in search.candidates}


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.1])
def test_the_fastest_candidate_is_found(noise):
    seconds = {"": 0.010, "a": 0.012, "b": 0.007, "c": 0.011, "d": 0.030, "e": 0.0072, "f": 0.009}
    machine = SimulatedMachine(seconds, noise)
    assert seconds[chosen(machine.search(), group(seconds))] <= 1.03 * min(seconds.values())
    assert machine.running == 0


def test_candidates_are_compared_within_rounds():
    """The machine becomes five times as slow during the search; the last candidate, the fastest, is still chosen."""
    seconds = {"": 0.010, "a": 0.012, "b": 0.011, "c": 0.009}
    machine = SimulatedMachine(seconds, 0.02, slowness=lambda now: 1.0 if now < 4 else 5.0)
    assert chosen(machine.search(), group(seconds)) == "c"


def test_slow_candidates_cost_little_time():
    seconds = {"": 0.010, "fast": 0.005, **{f"slow{i}": 0.050 for i in range(10)}}
    machine = SimulatedMachine(seconds, 0.02)
    chosen(machine.search(), group(seconds))
    assert max(machine.trained[f"slow{i}"] for i in range(10)) < machine.trained["fast"] / 2


def test_every_group_has_its_turn():
    """A group with many candidates that start slowly takes the turn of no other group, and time is left to compile."""
    many = [f"parallel={i}" for i in range(30)]
    cheap = ["parallel=0", "data.workers=1", "accumulation=2"]
    seconds = {"": 0.010} | dict.fromkeys([*many, "data.workers=1", "accumulation=2", "compile=true"], 0.011)
    machine = SimulatedMachine(seconds, startup=dict.fromkeys(many, 4.0) | {"compile=true": 15.0})
    search = machine.search(budget=45.0)
    groups = group(many), group(cheap[1:2], "data"), group(cheap[2:], "acc"), group(["compile=true"], "compile", 6)
    chosen(search, *groups)
    found = statuses(search)
    assert [found[name][0] for name in cheap] == ["measured"] * 3
    assert found["parallel=29"] == ("not tried", BUDGET_SPENT)
    assert found["compile=true"][0] == "measured"
    assert machine.now < 46


@pytest.mark.parametrize(("budget", "count"), [(1.0, 1), (15.0, 3)])  # the baseline is always measured
def test_a_small_budget_measures_what_it_can(budget, count):
    search = SimulatedMachine({"": 0.010} | dict.fromkeys("abcdef", 0.0101), startup={"": 3.0}).search(budget)
    search.run([group("abcd", weight=2), group("ef", "2")])
    assert sum(status == "measured" for status, _ in statuses(search).values()) == count
    assert statuses(search)["d"] == ("not tried", BUDGET_SPENT)


def test_groups_are_combined_with_the_fastest_so_far():
    machine = SimulatedMachine({"": 0.010, "a": 0.008, "b": 0.012, "a c": 0.006, "a c d": 0.007, "a c e": 0.006})
    search = machine.search()
    assert chosen(search, group("aba"), group("c", "2"), group("de", "3")) == "a c", "a tie, and it was there before"
    assert list(statuses(search)) == ["", "a", "b", "a c", "a c d", "a c e"]


def test_a_tie_keeps_the_baseline_or_else_the_candidate_that_starts_first():
    machine = SimulatedMachine({"": 0.010, "a": 0.005, "b": 0.00502}, startup={"a": 5.0})
    assert chosen(machine.search(), group("ab")) == "b"
    machine = SimulatedMachine({"": 0.010, "a": 0.00995}, 0.001)
    search = machine.search()
    assert chosen(search, group(["a"])) == ""
    assert plain(search.candidates[1], search.base, 64)["ties"]
    assert not plain(search.base, search.base, 64)["ties"]


def test_candidates_that_change_the_results_need_permission():
    machine = SimulatedMachine({"": 0.010, "a": 0.005, "b": 0.006}, results={"a": SIXTEEN_BITS, "b": STATISTICS})
    search = machine.search()
    assert chosen(search, group("ab")) == ""
    assert statuses(search)["a"] == ("not tried", "16-bit arithmetic")
    assert chosen(machine.search(allowed=[SIXTEEN_BITS]), group("ab")) == "a"


def test_a_candidate_that_fails_is_a_row():
    machine = SimulatedMachine({"": 0.010, "a": -1.0, "b": 0.005}, startup={"c": 1000.0})
    search = machine.search()
    assert chosen(search, group("abc")) == "b"
    found = statuses(search)
    assert found["a"] == ("crashed", "MemoryError: no memory")
    assert found["c"] == ("dropped", "no step")
    assert machine.now < 61
    base, failed, fast, _ = (plain(row, search.base, 64) for row in search.candidates)
    assert (fast["samples_per_second"], fast["speedup"]) == (pytest.approx(64 / 0.005), pytest.approx(2.0))
    assert (base["speedup"], failed["status"], failed["speedup"]) == (1.0, "crashed", None)


def test_a_baseline_that_fails_is_an_error():
    with pytest.raises(TrialError, match="no memory"):
        chosen(SimulatedMachine({"": -1.0}).search())
    with pytest.raises(TrialError, match="no step"):
        chosen(SimulatedMachine({"": 1.0}, startup={"": 1000.0}).search())


def test_a_ratio_has_an_uncertainty():
    row = Candidate(("a",), ratios=[0.9, 1.1, 1.0, 1.0])
    assert row.uncertainty == pytest.approx(2 * 1.2533 * 1.4826 * 0.05 / 4**0.5)
    few, base = Candidate(("b",), ratios=[0.95, 0.95]), Candidate(())
    assert (few.ratio, few.uncertainty, base.ratio, base.uncertainty) == (0.95, 0.1, 1.0, 0.0)
    assert not few.is_faster_than(base)
    assert Candidate(("c",), ratios=[0.9, 0.91, 0.9]).is_faster_than(base)
