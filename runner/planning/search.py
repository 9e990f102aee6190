"""Finds the fastest way to train a run: candidates train in turn, each beside the baseline.

A candidate and the baseline train in processes of their own, for a fraction of a second one after the other, while the
other one waits. A change of the machine's speed therefore affects both; only the ratio of their times is used. A
candidate that is slower than the fastest one is dropped as soon as this is clear.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import chain

from runner.planning.candidates import ALLOWED, RESULTS, Candidate, Group, Overrides
from runner.planning.trial import BURST_SECONDS, TooLateError, Trial, TrialError
from runner.system.tables import milliseconds

_MUCH_SLOWER = 1.6
"""A candidate whose steps take this many times as long as the fastest one's is dropped after a single round."""

MAX_ROUNDS = 9
"""Rounds for which a candidate is compared with the baseline, if it is not clearly slower than the fastest one."""

_LEAST_DIFFERENCE = 0.01
"""The smallest relative difference between the times of two candidates that counts, however precise they are."""

_FEW_ROUNDS, _UNKNOWN = 3, 0.1
"""The uncertainty of a ratio that is known from fewer rounds."""

_PATIENT_STARTS = 4
"""A candidate may take this many times as long to start as the baseline, whatever is left of its group's time."""

BUDGET_SPENT = "the budget is spent"


@dataclass
class Row:
    """What is known of a candidate.

    Args:
        candidate: the candidate.
        changes: its overrides, by the name of the group from which they come.
        status: `measured`, `refused`, `crashed`, `dropped` (it took too much time) or `not tried` (it is not allowed,
            or there was no time).
        reason: why it was not measured; empty if it was.
        startup_seconds: seconds until its first step was done; it includes the compilation of the model.
        memory_bytes: sum of the peak memory of its processes.
        seconds: the seconds of an optimizer step in each round.
        ratios: the same, divided by the seconds of a step of the baseline in the same round; empty for the baseline.
    """

    candidate: Candidate
    changes: dict[str, Overrides] = field(default_factory=dict)
    status: str = "not tried"
    reason: str = ""
    startup_seconds: float = 0.0
    memory_bytes: float = 0.0
    seconds: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)

    @property
    def step_seconds(self) -> float:
        """The median of the seconds of an optimizer step."""
        return statistics.median(self.seconds)

    @property
    def ratio(self) -> float:
        """The time of a step, divided by that of the baseline: the median over all rounds."""
        return statistics.median(self.ratios or [1.0])

    @property
    def uncertainty(self) -> float:
        """The uncertainty of `ratio`: twice the standard error of the median, estimated from the absolute deviations.

        It is 0.1 with fewer than three rounds, and 0 for the baseline.
        """
        if len(self.ratios) < _FEW_ROUNDS:
            return _UNKNOWN if self.ratios else 0.0
        spread = statistics.median(abs(each - self.ratio) for each in self.ratios)
        deviation = 1.4826 * spread  # of a normal distribution
        return 2 * 1.2533 * deviation / len(self.ratios) ** 0.5

    def is_faster_than(self, other: Row) -> bool:
        """Return whether the steps are clearly faster: by at least 1 %, and by more than the ratios are uncertain."""
        unclear = math.hypot(self.uncertainty, other.uncertainty)
        return other.ratio - self.ratio > max(_LEAST_DIFFERENCE * other.ratio, unclear)


class Search:
    """The search for the fastest candidate.

    Args:
        judge: returns the candidate with the given overrides (see `Candidates.judged`).
        start: starts a trial of a candidate, which may take the given number of seconds, or raises TrialError.
        budget: seconds that the search may take.
        allowed: the kinds of effect in `RESULTS` that a candidate may have, in addition to those in `ALLOWED`.
        clock: returns the time in seconds.
        report: called with a line about each candidate that has been tried.
    """

    def __init__(
        self,
        judge: Callable[[Overrides], Candidate],
        start: Callable[[Candidate, float], Trial],
        budget: float = 60.0,
        allowed: Iterable[str] = (),
        clock: Callable[[], float] = time.perf_counter,
        report: Callable[[str], None] = lambda line: None,
    ):
        self._judge, self._start, self._allowed = judge, start, {*ALLOWED, *allowed}
        self._clock, self._report, self._ends = clock, report, clock() + budget
        self.base = Row(judge(()))
        """The row of the baseline."""
        self.rows = [self.base]

    def run(self, groups: Sequence[Group]) -> Row:
        """Measure candidates, and return the row of the fastest, or of the baseline if none is clearly faster.

        The options of each group are combined with the fastest overrides of the groups before.

        Raises:
            TrialError: if the baseline, with which all others are compared, cannot train or fails later.
        """
        with closing(self._started(self.base, self._ends - self._clock())) as trial:
            self._burst(self.base, trial)
            for number, group in enumerate(groups):
                best, now = self._fastest(), self._clock()
                assert best.candidate.run is not None
                until = now + (self._ends - now) * group.weight / sum(each.weight for each in groups[number:])
                for words in group.options(best.candidate.run):
                    self._try(best.changes | {group.name: words}, until, trial)
            return self._fastest()

    def measured(self) -> list[Row]:
        """Return the measured rows, the fastest first."""
        return sorted((row for row in self.rows if row.seconds), key=lambda row: row.ratio)

    def _fastest(self) -> Row:
        """Return the baseline if no row is clearly faster; of rows that tie for the fastest, the first to start."""
        best, *others = self.measured()
        equal = [best, *(row for row in others if not best.is_faster_than(row))]
        return self.base if self.base in equal else min(equal, key=lambda row: row.startup_seconds)

    def _try(self, changes: dict[str, Overrides], until: float, base_trial: Trial) -> None:
        """Measure the candidate with `changes` if it is new, allowed and possible, and `until` is not over."""
        candidate = self._judge(tuple(chain.from_iterable(changes.values())))
        known = [row.candidate.run.config for row in self.rows if row.candidate.run is not None]
        if candidate.run is not None and candidate.run.config in known:
            return
        row = Row(candidate, changes)
        self.rows.append(row)
        now = self._clock()
        seconds = min(self._ends - now, max(until - now, _PATIENT_STARTS * self.base.startup_seconds))
        if candidate.refusal:
            row.status, row.reason = "refused", candidate.refusal
        elif candidate.results not in self._allowed:
            row.reason = RESULTS[candidate.results]
        elif now >= until or seconds <= self.base.startup_seconds:
            row.reason = BUDGET_SPENT
        else:
            self._compare(row, seconds, until, base_trial)
        found = f"{milliseconds(row.step_seconds)} a step" if row.seconds else f"{row.status}: {row.reason}"
        self._report(f"{' '.join(candidate.overrides)}: {found}")

    def _compare(self, row: Row, seconds: float, until: float, base_trial: Trial) -> None:
        """Let a candidate, which may take `seconds` to start, and the baseline train in turn."""
        best, turn = self._fastest(), row
        try:
            with closing(self._started(row, seconds)) as trial:
                while not row.ratios or self._goes_on(row, best, until):
                    pair = [(self.base, base_trial), (row, trial)]
                    for turn, each in pair if len(row.ratios) % 2 else reversed(pair):
                        self._burst(turn, each)
                    row.ratios.append(row.seconds[-1] / self.base.seconds[-1])
        except TrialError as error:
            if turn is self.base:
                raise
            late = isinstance(error, TooLateError)
            row.status, row.reason = "refused" if error.refused else "dropped" if late else "crashed", error.why
            row.seconds, row.ratios = [], []

    def _goes_on(self, row: Row, best: Row, until: float) -> bool:
        """Return whether there is a reason, and the time, to compare a candidate for another round."""
        count, now = len(row.ratios), self._clock()
        if count == MAX_ROUNDS or row.ratio > _MUCH_SLOWER * best.ratio or best.is_faster_than(row):
            return False
        ends = now + sum(max(BURST_SECONDS, each.step_seconds) for each in (self.base, row))
        return ends < self._ends and (count < _FEW_ROUNDS or ends < until)

    def _started(self, row: Row, seconds: float) -> Trial:
        """Start a trial and let it warm up, which may take `seconds` in all."""
        until, taken = self._clock() + seconds, 0.0
        trial = self._start(row.candidate, seconds)
        row.startup_seconds = trial.startup_seconds
        try:
            while taken < BURST_SECONDS / 2:
                began = self._clock()
                trial.burst(until - began)
                taken = self._clock() - began
        except TrialError:
            trial.close()
            raise
        return trial

    def _burst(self, row: Row, trial: Trial) -> None:
        burst = trial.burst(60 + 10 * row.startup_seconds)  # after that, it is taken to hang
        row.status, row.memory_bytes = "measured", burst.memory_bytes
        row.seconds.append(burst.step_seconds)
