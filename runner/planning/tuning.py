"""Finds the fastest way to train a run: candidates train in turn, and the slow ones are dropped early.

The search is a successive halving (Jamieson and Talwalkar, "Non-stochastic best arm identification and hyperparameter
optimization", 2016). Every candidate trains in processes of its own and waits while others train. In each round, some
candidates train for a fraction of a second, one after another, so that a change of the machine's speed affects all of
them. If there are rounds in which two candidates have both trained, their times in these rounds are compared.
Otherwise, the medians of all their times are compared.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from runner.planning.candidates import ALLOWED, RESULTS, Candidate, Overrides
from runner.planning.formatting import milliseconds
from runner.planning.trial import Burst, TooLateError, TrialError

_BURST_SECONDS = 0.4
"""Seconds that a candidate trains in a round, if a single step does not take longer."""

_MUCH_SLOWER = 1.6
"""A candidate whose steps take this many times as long as the best one's is dropped after its first burst."""

_FINALISTS = 3
_ROUNDS = 7
"""Number of rounds for which finalists are compared. If they cannot be told apart by then, the comparison goes on until
they can, for at most three times as many rounds in total."""

_LEAST_DIFFERENCE = 0.01
"""The smallest relative difference between the times of two candidates that counts, however precise they are."""

_UNKNOWN = 0.1
"""The uncertainty of the ratio of two candidates that have at most two rounds in common."""

_DEVIATION_OF_MAD, _ERROR_OF_MEDIAN = 1.4826, 1.2533
"""For normally distributed values, the standard deviation divided by the median absolute deviation, and the standard
error of the median divided by the standard error of the mean."""

_PATIENCE = 60.0
"""A burst may take ten times its usual time plus this many seconds; after that, its trial is taken to hang."""

BUDGET_SPENT = "the budget is spent"
"""The reason in the row of a candidate that was not measured for lack of time."""

_RESERVED = 0.15
"""The part of the budget that is kept for the rounds of the finalists."""


Groups = Sequence[Callable[[Overrides], Iterable[Candidate]]]


class Trains(Protocol):
    """The part of the interface of `Trial` that a search uses."""

    startup_seconds: float

    def steps(self, count: int, seconds: float) -> Burst: ...

    def close(self, kill: bool = False) -> None: ...


@dataclass
class Row:
    """What is known of a candidate, which trains for a burst (some iterations of the training loop) in each round.

    Args:
        candidate: the candidate.
        status: `measured`, `refused`, `crashed`, `dropped` (it does not fit into memory, resembles a much slower
            candidate, or took too long) or `not tried` (it is not allowed, or there was no time).
        reason: why it was not measured; empty if it was.
        startup_seconds: seconds until its first step was done; it includes the compilation of the model.
        memory_bytes: sum of the peak memory of its processes.
        bursts: a dict from the number of each round to the seconds per optimizer step in this round.
        is_much_slower: whether its trial was ended after the first burst, because it was much slower than the fastest
            candidate; its status is still `measured`.
        trial: its trial; None if it has not been started, or has ended.
        burst_length: number of iterations of the training loop in a burst.
        burst_seconds: about how long a burst takes.
    """

    candidate: Candidate
    status: str = "not tried"
    reason: str = ""
    startup_seconds: float = 0.0
    memory_bytes: float = 0.0
    bursts: dict[int, float] = field(default_factory=dict)
    is_much_slower: bool = False
    trial: Trains | None = None
    burst_length: int = 1
    burst_seconds: float = 0.0

    @property
    def overrides(self) -> Overrides:
        return self.candidate.overrides

    @property
    def step_seconds(self) -> float:
        """The median of the seconds of an optimizer step."""
        return statistics.median(self.bursts.values())

    @property
    def spread(self) -> tuple[float, float]:
        """The first and the third quartile of the seconds of an optimizer step."""
        values = list(self.bursts.values())
        if len(values) < 2:
            return values[0], values[0]
        first, _, third = statistics.quantiles(values, n=4, method="inclusive")
        return first, third


class Ratio(NamedTuple):
    """The step time of one row divided by the step time of another row, and the uncertainty of this ratio."""

    value: float
    uncertainty: float

    @property
    def is_clear(self) -> bool:
        """Whether the rows can be told apart: `value` differs from 1 by more than `uncertainty`."""
        return abs(self.value - 1) > self.uncertainty


def ratio(row: Row, other: Row) -> Ratio:
    """Return the time of a step of `row`, divided by the time of a step of `other`, and the uncertainty of this ratio.

    The ratio is computed for each round in which both trained, and the median of these ratios is returned. If there is
    no such round, the median of all times of `row` is divided by that of `other`. The uncertainty is twice the standard
    error of the median, estimated from the median absolute deviation, but at least 0.01. With fewer than three common
    rounds, it is 0.1.
    """
    values = [row.bursts[each] / other.bursts[each] for each in row.bursts.keys() & other.bursts.keys()]
    if not values:
        return Ratio(row.step_seconds / other.step_seconds, _UNKNOWN)
    middle = statistics.median(values)
    deviation = _DEVIATION_OF_MAD * statistics.median(abs(value - middle) for value in values)
    known = 2 * _ERROR_OF_MEDIAN * deviation / len(values) ** 0.5 if len(values) > 2 else _UNKNOWN
    return Ratio(middle, max(_LEAST_DIFFERENCE, known))


HasRoom = Callable[[Candidate, Row, Sequence[Row]], bool]


class Search:
    """The search for the fastest candidate.

    Args:
        start: function that starts a trial of a candidate, and returns the trial. It is called with the candidate and
            the number of seconds that the start may take. It raises TrialError if the trial cannot start.
        budget: seconds that the search may take.
        allowed: the kinds of effect that a candidate may have on the results of the run, in addition to those in
            `candidates.ALLOWED`; keys of `candidates.RESULTS`. A candidate with any other effect is not tried.
        has_room: function that returns whether there is enough memory to start a candidate. It is called with the
            candidate, the row of the default, and the rows whose trials are waiting.
        clock: function that returns the time in seconds.
        report: function that is called with a line about each candidate that has been tried.
    """

    def __init__(
        self,
        start: Callable[[Candidate, float], Trains],
        budget: float = 60.0,
        allowed: Iterable[str] = (),
        has_room: HasRoom = lambda candidate, default, waiting: True,
        clock: Callable[[], float] = time.perf_counter,
        report: Callable[[str], None] = lambda line: None,
    ):
        self._start, self._budget, self._allowed = start, budget, {*ALLOWED, *allowed}
        self._has_room, self._clock, self._report = has_room, clock, report
        self._began, self._group_ends, self._round = clock(), 0.0, 0
        self.rows: list[Row] = []

    def run(
        self,
        default: Candidate,
        groups: Groups,
        budget_for: Callable[[Row], float | None] = lambda row: None,
    ) -> Row:
        """Measure candidates, and return the row of the fastest, or of the default if no other is clearly faster.

        Args:
            default: the run as it is.
            groups: functions that are called in order. Each is called with the overrides of the fastest candidate so
                far, and returns further candidates. To start the candidates of the last function, all remaining time
                may be used, except the time that is reserved for the last rounds. To start the candidates of any other
                function, only half of this time may be used.
            budget_for: function that is called with the row of the default, after the default has been measured. It
                returns the number of seconds for all other candidates, or 0 to measure none of them. If it returns
                None, the other candidates have the rest of the budget of the search.

        Raises:
            TrialError: if the default, with which all others are compared, cannot train or fails later.
        """
        try:
            self._try(default)
            seconds = budget_for(self.default)
            if seconds is not None:
                self._budget, self._began = seconds, self._clock()
            if seconds == 0:
                return self.default
            for number, group in enumerate(groups, start=1):
                part = 0.5 if number < len(groups) else 1.0
                self._group_ends = self._clock() + part * (self._left() - self._reserved())
                tried = [self._try(candidate) for candidate in group(self._live()[0].overrides)]
                if any(row.trial for row in tried):
                    self._halve(2)
            self._compare()
            return self._fastest()
        finally:
            for row in self.rows:
                self._end(row)

    @property
    def default(self) -> Row:
        """The row of the run with its own options, without any change."""
        return self.rows[0]

    @property
    def noise(self) -> float:
        """The variation of the default's step time over rounds: half the interquartile range divided by the median."""
        first, third = self.default.spread
        return (third - first) / 2 / self.default.step_seconds

    def measured(self) -> list[Row]:
        """Return the measured rows, the fastest first."""
        return sorted((row for row in self.rows if row.bursts), key=lambda row: ratio(row, self.default).value)

    # -----------------------------------------------------------------------------------------------------------------

    def _left(self) -> float:
        return self._budget - (self._clock() - self._began)

    def _try(self, candidate: Candidate) -> Row:
        """Measure a candidate if this is worthwhile and possible, and return its row.

        A candidate is not measured if it is refused or not allowed, if a similar candidate was much slower than the
        fastest one (see `_slow_relative`), or if there is not enough time or memory. The row then has the reason.
        """
        row = Row(candidate)
        self.rows.append(row)
        seconds = self._left() if row is self.default else self._group_ends - self._clock()
        if candidate.refusal:
            row.status, row.reason = "refused", candidate.refusal
        elif candidate.results not in self._allowed:
            row.reason = RESULTS[candidate.results]
        elif slow := self._slow_relative(candidate):
            row.status, row.reason = "dropped", f"{' '.join(slow.overrides)} is much slower than others"
        elif seconds <= (0 if row is self.default else self.default.startup_seconds):
            row.reason = BUDGET_SPENT
            if row is self.default:
                raise TooLateError("no time was left for a step")
        elif not self._makes_room(candidate):
            row.status, row.reason = "dropped", "it does not fit into memory"
        else:
            self._begin(row, seconds)
        self._report(describe(row))
        return row

    def _reserved(self) -> float:
        """Return the seconds that are kept for the last rounds."""
        return max(_RESERVED * self._budget, 2 * self.default.step_seconds * self.default.burst_length)

    def _slow_relative(self, candidate: Candidate) -> Row | None:
        """Return a much slower row whose first two overrides are those of `candidate`; None if there is none.

        A row is much slower if its `is_much_slower` is True. The first two overrides usually set the parallel mode and
        the number of processes. If the first override of `candidate` does not set the parallel mode or one of its
        options, the result is None.
        """
        same = candidate.overrides[:2]
        if not same or not same[0].startswith("parallel"):
            return None
        slow = (row for row in self.rows if row.is_much_slower and row.overrides[:2] == same)
        return next(slow, None)

    def _makes_room(self, candidate: Candidate) -> bool:
        """End the slowest trials until there is room for `candidate`, and return whether there is."""
        while not self._has_room(candidate, self.default, self._live()):
            waiting = [row for row in self._live() if row is not self.default]
            if not waiting:
                return False
            self._end(waiting[-1])
        return True

    def _begin(self, row: Row, seconds: float) -> None:
        """Start the trial of `row`, choose its burst length, and measure a burst.

        The start and the choice of the burst length together may take `seconds`.
        """
        until = self._clock() + seconds
        try:
            row.trial = self._start(row.candidate, seconds)
            row.startup_seconds = row.trial.startup_seconds
            self._choose_burst_length(row, until)
        except TrialError as error:
            self._fail(row, error)
            return
        row.status = "measured"
        self._round_of([row] if row is self.default else [self.default, row])
        if row.trial is not None and ratio(row, self._live()[0]).value > _MUCH_SLOWER and row is not self.default:
            row.is_much_slower = True
            self._end(row)

    def _choose_burst_length(self, row: Row, until: float) -> None:
        """Choose the number of iterations in a burst: as many as take `_BURST_SECONDS`, but at least one."""
        assert row.trial is not None
        count, taken = 1, 0.0
        while taken < _BURST_SECONDS / 2:
            began = self._clock()
            row.memory_bytes = row.trial.steps(count, until - began).memory_bytes
            taken = self._clock() - began
            row.burst_length = max(1, round(count * _BURST_SECONDS / max(taken, 1e-6)))
            row.burst_seconds = row.burst_length * taken / count
            count = min(row.burst_length, 8 * count)

    def _round_of(self, rows: list[Row]) -> None:
        """Let each of the rows train for a burst; each round begins with a different row.

        A row whose trial fails is passed to `_fail`.
        """
        self._round += 1
        first = self._round % len(rows)
        for row in [*rows[first:], *rows[:first]]:
            try:
                assert row.trial is not None
                burst = row.trial.steps(row.burst_length, _PATIENCE + 10 * row.burst_seconds)
            except TrialError as error:
                self._fail(row, error)
                continue
            row.bursts[self._round] = burst.step_seconds
            row.memory_bytes = max(row.memory_bytes, burst.memory_bytes)

    def _fail(self, row: Row, error: TrialError) -> None:
        """End the trial of `row`, which has failed: erase its measurements, and record its status and the reason.

        Raises:
            TrialError: `error`, if `row` is the row of the default, without which the search cannot go on.
        """
        late = isinstance(error, TooLateError)
        row.status, row.reason = "refused" if error.refused else "dropped" if late else "crashed", error.why
        row.bursts.clear()
        self._end(row, kill=True)
        if row is self.default:
            raise error

    def _end(self, row: Row, kill: bool = False) -> None:
        if row.trial is not None:
            row.trial.close(kill)
            row.trial = None

    # -----------------------------------------------------------------------------------------------------------------

    def _live(self) -> list[Row]:
        """Return the rows whose trials are waiting, the fastest first."""
        return [row for row in self.measured() if row.trial is not None]

    def _fits(self, rows: Iterable[Row]) -> bool:
        """Return whether there is time for a round of `rows`."""
        return sum(row.burst_length * row.step_seconds for row in rows) < self._left()

    def _halve(self, rounds: int) -> None:
        """Let the trials train for `rounds` rounds, and end the slower half of them after each round.

        The default is never ended, nor is a row that cannot be told apart from the fastest one. At least `_FINALISTS`
        rows remain. If there is no time for a round, the function returns early.
        """
        for _ in range(rounds):
            live = self._live()
            if len(live) < 2 or not self._fits(live):
                return
            self._round_of(live)
            best, *others = self._live()
            for row in others[max(_FINALISTS, len(live) // 2) - 1 :]:
                if row is not self.default and ratio(row, best).is_clear:
                    self._end(row)

    def _compare(self) -> None:
        """Compare the finalists until they can be told apart (see `_ROUNDS`) or the budget is spent."""
        for row in self._live()[_FINALISTS:]:
            if row is not self.default:
                self._end(row)
        while len(live := self._live()) > 1 and self._fits(live):
            rounds = min(len(row.bursts) for row in live)
            clear = all(ratio(row, live[0]).is_clear for row in live[1:])
            if rounds >= 3 * _ROUNDS or (rounds >= _ROUNDS and clear):
                return
            self._round_of(live)

    def _fastest(self) -> Row:
        """Return the row that the search chooses.

        If no row is clearly faster than the default, this is the default. Otherwise, it is the fastest row, or the row
        with the shortest startup if several rows cannot be told apart from the fastest one.
        """
        best, *others = self._live()
        equal = [best, *(row for row in others if not ratio(row, best).is_clear)]
        if self.default in equal or not ratio(best, self.default).is_clear:
            return self.default
        return min(equal, key=lambda row: row.startup_seconds)


def describe(row: Row) -> str:
    """Return a line with the overrides of a row, and its step time or the reason why it was not measured."""
    name = " ".join(row.overrides) or "as it is"
    if row.bursts:
        return f"{name}: {milliseconds(row.step_seconds)} a step"
    return f"{name}: {row.status}: {row.reason}"


def as_plain(search: Search, chosen: Row, samples: int) -> dict[str, Any]:
    """Return the result of a search as plain values, for JSON.

    Args:
        search: the search, after it has been run.
        chosen: the row that it returned.
        samples: number of samples in an optimizer step.

    Returns:
        A dict: `chosen`, the overrides of the chosen row; `speedup`, the step time of the default divided by that of
        the chosen row; `noise`, as in `Search`; and `rows`, a dict for each candidate (see `_plain`). The candidates
        that were measured come first, from the fastest to the slowest.
    """
    measured = search.measured()
    others = [row for row in search.rows if not row.bursts]
    return {
        "chosen": list(chosen.overrides),
        "speedup": 1 / ratio(chosen, search.default).value,
        "noise": search.noise,
        "rows": [_plain(row, search.default, samples) for row in [*measured, *others]],
    }


def _plain(row: Row, default: Row, samples: int) -> dict[str, Any]:
    """Return a row as plain values; what was not measured is None.

    Returns:
        A dict: `overrides`, `results`, `status` and `reason`, as in `Row` and `Candidate`; `rounds`, the number of
        rounds in which the row was measured; `samples_per_second`, and `spread`, the first and the third quartile of
        this number; `speedup` over the default, and the `uncertainty` of this ratio; `ties`, whether the row cannot be
        told apart from the default; `memory_bytes`; `startup_seconds`; and `break_even_steps`, the number of steps
        after which the row has made up for a slower start, None if it never does.
    """
    found: dict[str, Any] = {
        "overrides": list(row.overrides),
        "results": row.candidate.results,
        "status": row.status,
        "reason": row.reason,
        "samples_per_second": None,
        "spread": None,
        "speedup": None,
        "uncertainty": None,
        "ties": None,
        "memory_bytes": None,
        "startup_seconds": None,
        "break_even_steps": None,
        "rounds": len(row.bursts),
    }
    if row.bursts:
        compared = ratio(row, default)
        first, third = row.spread
        found |= {
            "samples_per_second": samples / row.step_seconds,
            "spread": [samples / third, samples / first],
            "speedup": 1 / compared.value,
            "uncertainty": compared.uncertainty / compared.value**2,
            "ties": row is not default and not compared.is_clear,
            "memory_bytes": row.memory_bytes,
            "startup_seconds": row.startup_seconds,
            "break_even_steps": _break_even(row, default, compared.value),
        }
    return found


def _break_even(row: Row, default: Row, value: float) -> float | None:
    """Return after how many steps `row` has made up for a slower start; None if it never does.

    Args:
        row: a measured row.
        default: the row of the run as it is.
        value: the step time of `row` divided by the step time of the default.
    """
    if value >= 1:
        return None
    return max(0.0, (row.startup_seconds - default.startup_seconds) / (default.step_seconds * (1 - value)))
