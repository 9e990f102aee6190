"""Finds the fastest way to train a run: candidates train in turn, and the slow ones are dropped early.

The search is a successive halving (Jamieson and Talwalkar, "Non-stochastic best arm identification and hyperparameter
optimization", 2016). Every candidate trains in processes of its own and waits while others train. In each round, some
candidates train for a fraction of a second, one after another, so that a change of the machine's speed affects all of
them; only times of the same round are compared.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from runner.planning.candidates import ALLOWED, RESULTS, Candidate, Group, Overrides
from runner.planning.formatting import milliseconds
from runner.planning.trial import BURST_SECONDS, TooLateError, Trial, TrialError

_MUCH_SLOWER = 1.6
"""A candidate whose steps take this many times as long as the best one's is dropped after its first burst."""

_FINALISTS = 3
ROUNDS = 7
"""Rounds for which finalists are compared; three times as many if they cannot be told apart by then."""

_LEAST_DIFFERENCE = 0.01
"""The smallest relative difference between the times of two candidates that counts, however precise they are."""

_UNKNOWN = 0.1
"""The uncertainty of the ratio of two candidates that have at most two rounds in common."""

_FOR_FINALISTS = 0.15
"""The part of the budget that is kept for the rounds of the finalists."""

_PATIENT_STARTS = 4
"""A candidate may take this many times as long to start as the baseline, whatever is left of its group's time."""

BUDGET_SPENT = "the budget is spent"


@dataclass
class Row:
    """What is known of a candidate.

    Args:
        candidate: the candidate.
        changes: its overrides, by the name of the group from which they come.
        status: `measured`, `refused`, `crashed`, `dropped` (it takes too much memory or time) or `not tried` (it is not
            allowed, or there was no time).
        reason: why it was not measured; empty if it was.
        startup_seconds: seconds until its first step was done; it includes the compilation of the model.
        memory_bytes: sum of the peak memory of its processes.
        bursts: a dict from the number of each round to the seconds of an optimizer step in this round.
        trial: its trial; None if it has not been started, or has ended.
    """

    candidate: Candidate
    changes: dict[str, Overrides] = field(default_factory=dict)
    status: str = "not tried"
    reason: str = ""
    startup_seconds: float = 0.0
    memory_bytes: float = 0.0
    bursts: dict[int, float] = field(default_factory=dict)
    trial: Trial | None = None

    @property
    def step_seconds(self) -> float:
        """The median of the seconds of an optimizer step."""
        return statistics.median(self.bursts.values())


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

    The ratio is the median over the rounds in which both trained or, if there is no such round, the ratio of the
    medians of all their rounds. The uncertainty is twice the standard error of the median, estimated from the median
    absolute deviation, but at least 0.01; with fewer than three common rounds, it is 0.1.
    """
    values = [row.bursts[each] / other.bursts[each] for each in row.bursts.keys() & other.bursts.keys()]
    if not values:
        return Ratio(row.step_seconds / other.step_seconds, _UNKNOWN)
    middle = statistics.median(values)
    deviation = 1.4826 * statistics.median(abs(value - middle) for value in values)  # of a normal distribution
    known = 2 * 1.2533 * deviation / len(values) ** 0.5 if len(values) > 2 else _UNKNOWN
    return Ratio(middle, max(_LEAST_DIFFERENCE, known))


class Search:
    """The search for the fastest candidate.

    Args:
        judge: function that returns the candidate with the given overrides (see `Candidates.judged`).
        start: function that starts a trial of a candidate in the given number of seconds, or raises TrialError.
        budget: seconds that the search may take.
        allowed: the kinds of effect in `RESULTS` that a candidate may have, in addition to those in `ALLOWED`.
        has_room: function that returns whether there is enough memory to start a candidate. It is called with the
            candidate, the row of the baseline, and the rows whose trials are waiting.
        clock: function that returns the time in seconds.
        report: function that is called with a line about each candidate that has been tried.
    """

    def __init__(
        self,
        judge: Callable[[Overrides], Candidate],
        start: Callable[[Candidate, float], Trial],
        budget: float = 60.0,
        allowed: Iterable[str] = (),
        has_room: Callable[[Candidate, Row, Sequence[Row]], bool] = lambda *_: True,
        clock: Callable[[], float] = time.perf_counter,
        report: Callable[[str], None] = lambda line: None,
    ):
        self._judge, self._start, self._budget, self._allowed = judge, start, budget, {*ALLOWED, *allowed}
        self._has_room, self._clock, self._report = has_room, clock, report
        self._ends, self._round = clock() + budget, 0
        self.base = Row(judge(()))
        """The row of the baseline."""
        self.rows = [self.base]

    def run(self, groups: Sequence[Group]) -> Row:
        """Measure candidates, and return the row of the fastest, or of the baseline if none is clearly faster.

        The options of each group are combined with the fastest overrides of the groups before.

        Raises:
            TrialError: if the baseline, with which all others are compared, cannot train or fails later.
        """
        try:
            self._measure(self.base, self._budget)
            for number, group in enumerate(groups):
                best, count = self._live()[0], len(self.rows)
                assert best.candidate.run is not None
                share = group.weight / sum(each.weight for each in groups[number:])
                until = self._clock() + share * self._left()
                for words in group.options(best.candidate.run):
                    self._try(best.changes | {group.name: words}, until)
                if any(row.trial for row in self.rows[count:]):
                    self._halve()
            self._compare()
            return self._fastest()
        finally:
            for row in self.rows:
                self._end(row)

    def measured(self) -> list[Row]:
        """Return the measured rows, the fastest first."""
        return sorted((row for row in self.rows if row.bursts), key=lambda row: ratio(row, self.base).value)

    def _live(self) -> list[Row]:
        """Return the rows whose trials are waiting, the fastest first."""
        return [row for row in self.measured() if row.trial is not None]

    def _left(self) -> float:
        """Return the seconds that are left before those of the finalists."""
        return self._ends - self._clock() - max(_FOR_FINALISTS * self._budget, 2 * _round_seconds([self.base]))

    def _try(self, changes: dict[str, Overrides], until: float) -> None:
        """Measure the candidate with `changes` if it is new, allowed and possible, and `until` is not over."""
        candidate = self._judge(tuple(chain.from_iterable(changes.values())))
        known = [row.candidate.run.config for row in self.rows if row.candidate.run is not None]
        if candidate.run is not None and candidate.run.config in known:
            return
        row = Row(candidate, changes)
        self.rows.append(row)
        now = self._clock()
        seconds = min(self._left(), max(until - now, _PATIENT_STARTS * self.base.startup_seconds))
        if candidate.refusal:
            row.status, row.reason = "refused", candidate.refusal
        elif candidate.results not in self._allowed:
            row.reason = RESULTS[candidate.results]
        elif now >= until or seconds <= self.base.startup_seconds:
            row.reason = BUDGET_SPENT
        elif not self._makes_room(candidate):
            row.status, row.reason = "dropped", "it does not fit into memory"
        else:
            self._measure(row, seconds)
        known = f"{milliseconds(row.step_seconds)} a step" if row.bursts else f"{row.status}: {row.reason}"
        self._report(f"{' '.join(candidate.overrides)}: {known}")

    def _makes_room(self, candidate: Candidate) -> bool:
        """End the slowest trials until there is room for `candidate`, and return whether there is."""
        while not self._has_room(candidate, self.base, self._live()):
            waiting = [row for row in self._live() if row is not self.base]
            if not waiting:
                return False
            self._end(waiting[-1])
        return True

    def _measure(self, row: Row, seconds: float) -> None:
        """Start the trial of `row`, let it warm up, which may take `seconds` in all, and measure a burst."""
        until, taken = self._clock() + seconds, 0.0
        try:
            row.trial = self._start(row.candidate, seconds)
            row.startup_seconds = row.trial.startup_seconds
            while taken < BURST_SECONDS / 2:
                began = self._clock()
                row.trial.burst(until - began)
                taken = self._clock() - began
        except TrialError as error:
            self._fail(row, error)
            return
        row.status = "measured"
        self._train([row] if row is self.base else [self.base, row])
        if row.trial is not None and row is not self.base and ratio(row, self._live()[0]).value > _MUCH_SLOWER:
            self._end(row)

    def _train(self, rows: list[Row]) -> None:
        """Let each of the rows train for a burst; each round begins with a different row."""
        self._round += 1
        first = self._round % len(rows)
        for row in [*rows[first:], *rows[:first]]:
            assert row.trial is not None
            try:
                burst = row.trial.burst(60 + 10 * row.startup_seconds)  # after that, it is taken to hang
            except TrialError as error:
                self._fail(row, error)
                continue
            row.bursts[self._round], row.memory_bytes = burst.step_seconds, burst.memory_bytes

    def _fail(self, row: Row, error: TrialError) -> None:
        """End the trial of `row`, which has failed: erase its measurements, and record its status and the reason."""
        late = isinstance(error, TooLateError)
        row.status, row.reason = "refused" if error.refused else "dropped" if late else "crashed", error.why
        row.bursts.clear()
        self._end(row, kill=True)
        if row is self.base:
            raise error

    def _end(self, row: Row, kill: bool = False) -> None:
        if row.trial is not None:
            row.trial.close(kill)
            row.trial = None

    def _has_time(self, rows: Iterable[Row]) -> bool:
        return _round_seconds(rows) < self._ends - self._clock()

    def _halve(self) -> None:
        """Let the waiting trials train for two rounds, and end the slower half of them after each round.

        The baseline is never ended, nor is a row that cannot be told apart from the fastest one.
        """
        for _ in range(2):
            live = self._live()
            if len(live) < 2 or not self._has_time(live):
                return
            self._train(live)
            best, *others = self._live()
            for row in others[max(_FINALISTS, len(live) // 2) - 1 :]:
                if row is not self.base and ratio(row, best).is_clear:
                    self._end(row)

    def _compare(self) -> None:
        """Compare the finalists until they can be told apart (see `ROUNDS`) or the budget is spent."""
        for row in self._live()[_FINALISTS:]:
            if row is not self.base:
                self._end(row)
        while len(live := self._live()) > 1 and self._has_time(live):
            rounds = min(len(row.bursts) for row in live)
            clear = all(ratio(row, live[0]).is_clear for row in live[1:])
            if rounds >= 3 * ROUNDS or (rounds >= ROUNDS and clear):
                return
            self._train(live)

    def _fastest(self) -> Row:
        """Return the baseline if no row is clearly faster; of rows that tie for the fastest, the first to start."""
        best, *others = self._live()
        equal = [best, *(row for row in others if not ratio(row, best).is_clear)]
        if self.base in equal or not ratio(best, self.base).is_clear:
            return self.base
        return min(equal, key=lambda row: row.startup_seconds)


def _round_seconds(rows: Iterable[Row]) -> float:
    return sum(max(BURST_SECONDS, row.step_seconds) for row in rows)
