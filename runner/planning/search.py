"""Finds the fastest way to train a run: candidates train in turn, each beside the baseline.

A candidate and the baseline train in processes of their own, for a fraction of a second one after the other, while the
other one waits. A change of the machine's speed therefore affects both; only the ratio of their times is used. A
candidate that is slower than the fastest one is dropped as soon as this is clear.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing

from runner.planning.candidates import ALLOWED, RESULTS, Candidate, Group, Overrides
from runner.planning.trial import BURST_SECONDS, TooLateError, Trial, TrialError
from runner.system.tables import milliseconds

_MUCH_SLOWER = 1.6
"""A candidate whose steps take this many times as long as the fastest one's is dropped after a single round."""

MAX_ROUNDS = 9
"""Rounds for which a candidate is compared with the baseline, if it is not clearly slower than the fastest one."""

_PATIENT_STARTS = 4
"""A candidate may take this many times as long to start as the baseline, whatever is left of its group's time."""

BUDGET_SPENT = "the budget is spent"


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
        self.base = judge(())
        """The baseline."""
        self.candidates = [self.base]

    def run(self, groups: Sequence[Group]) -> Candidate:
        """Measure candidates, and return the fastest, or the baseline if none is clearly faster.

        The options of each group are combined with the fastest overrides of the groups before.

        Raises:
            TrialError: if the baseline, with which all others are compared, cannot train or fails later.
        """
        with closing(self._started(self.base, self._ends - self._clock())) as trial:
            self._burst(self.base, trial)
            for number, group in enumerate(groups):
                best, now = self._fastest(), self._clock()
                assert best.run is not None
                until = now + (self._ends - now) * group.weight / sum(each.weight for each in groups[number:])
                for words in group.options(best.run):
                    self._try((*best.overrides, *words), until, trial)
            return self._fastest()

    def measured(self) -> list[Candidate]:
        """Return the measured candidates, the fastest first."""
        return sorted((each for each in self.candidates if each.seconds), key=lambda each: each.ratio)

    def _fastest(self) -> Candidate:
        """Return the baseline if none is clearly faster; of candidates that tie for the fastest, the first to start."""
        best, *others = self.measured()
        equal = [best, *(each for each in others if not best.is_faster_than(each))]
        return self.base if self.base in equal else min(equal, key=lambda each: each.startup_seconds)

    def _try(self, overrides: Overrides, until: float, base_trial: Trial) -> None:
        """Measure the candidate with `overrides` if it is new, allowed and possible, and `until` is not over."""
        candidate, now = self._judge(overrides), self._clock()
        if candidate.run is not None:
            if candidate.run.config in (each.run.config for each in self.candidates if each.run is not None):
                return
            seconds = min(self._ends - now, max(until - now, _PATIENT_STARTS * self.base.startup_seconds))
            if candidate.results not in self._allowed:
                candidate.reason = RESULTS[candidate.results]
            elif now >= until or seconds <= self.base.startup_seconds:
                candidate.reason = BUDGET_SPENT
            else:
                self._compare(candidate, seconds, until, base_trial)
        self.candidates.append(candidate)
        status = f"{candidate.status}: {candidate.reason}"
        found = f"{milliseconds(candidate.step_seconds)} a step" if candidate.seconds else status
        self._report(f"{' '.join(overrides)}: {found}")

    def _compare(self, candidate: Candidate, seconds: float, until: float, base_trial: Trial) -> None:
        """Let a candidate, which may take `seconds` to start, and the baseline train in turn."""
        best, turn = self._fastest(), candidate
        try:
            with closing(self._started(candidate, seconds)) as trial:
                while not candidate.ratios or self._goes_on(candidate, best, until):
                    pair = [(self.base, base_trial), (candidate, trial)]
                    for turn, each in pair if len(candidate.ratios) % 2 else reversed(pair):
                        self._burst(turn, each)
                    candidate.ratios.append(candidate.seconds[-1] / self.base.seconds[-1])
        except TrialError as error:
            if turn is self.base:
                raise
            late = isinstance(error, TooLateError)
            candidate.status = "refused" if error.refused else "dropped" if late else "crashed"
            candidate.reason, candidate.seconds, candidate.ratios = error.why, [], []

    def _goes_on(self, candidate: Candidate, best: Candidate, until: float) -> bool:
        """Return whether there is a reason, and the time, to compare a candidate for another round."""
        count, now = len(candidate.ratios), self._clock()
        if count == MAX_ROUNDS or candidate.ratio > _MUCH_SLOWER * best.ratio or best.is_faster_than(candidate):
            return False
        ends = now + sum(max(BURST_SECONDS, each.step_seconds) for each in (self.base, candidate))
        return ends < self._ends and (count < 3 or ends < until)

    def _started(self, candidate: Candidate, seconds: float) -> Trial:
        """Start a trial and let it warm up, which may take `seconds` in all."""
        until, taken = self._clock() + seconds, 0.0
        trial = self._start(candidate, seconds)
        candidate.startup_seconds = trial.startup_seconds
        try:
            while taken < BURST_SECONDS / 2:
                began = self._clock()
                trial.burst(until - began)
                taken = self._clock() - began
        except TrialError:
            trial.close()
            raise
        return trial

    def _burst(self, candidate: Candidate, trial: Trial) -> None:
        burst = trial.burst(60 + 10 * candidate.startup_seconds)  # after that, it is taken to hang
        candidate.status, candidate.memory_bytes = "measured", burst.memory_bytes
        candidate.seconds.append(burst.step_seconds)
