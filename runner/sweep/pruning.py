"""Pruners, which compare the trials of a search after the same number of evaluations, and stop unpromising trials."""

from __future__ import annotations

import statistics
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from runner.sweep.objective import Objective

_LEAST_OTHERS = 4
"""The median rule stops a trial only if it can compare the trial with at least this number of other trials."""
_REDUCTION = 3
"""At each rung of successive halving, one in this number of trials continues."""


class Pruner(ABC):
    """A rule that stops trials. A stopped trial may continue later if other trials turn out to be worse.

    Args:
        objective: the metric by which trials are compared.
    """

    def __init__(self, objective: Objective):
        self.objective = objective

    @abstractmethod
    def continues(self, number: int, curves: Sequence[Sequence[float]], trial: int) -> bool:
        """Return whether a trial continues after its evaluation `number`.

        Args:
            number: the number of the evaluation, starting at 1.
            curves: the metric values of each trial, one per evaluation.
            trial: the index of the trial in `curves`. Its curve must have at least `number` values; the other curves
                may be shorter.
        """

    def _others(self, number: int, curves: Sequence[Sequence[float]], trial: int) -> list[float]:
        return [curve[number - 1] for i, curve in enumerate(curves) if i != trial and len(curve) >= number]


class Median(Pruner):
    """A median rule: a trial stops if its value is worse than the median of the other trials' values.

    All values are compared after the same number of evaluations. The trial continues if fewer than four other trials
    have had this number of evaluations.

    The rule of Golovin et al., "Google Vizier: A Service for Black-Box Optimization", KDD 2017, compares a trial's best
    value with the median of running averages instead.
    """

    def continues(self, number: int, curves: Sequence[Sequence[float]], trial: int) -> bool:
        others = self._others(number, curves, trial)
        if len(others) < _LEAST_OTHERS:
            return True
        return not self.objective.is_better(statistics.median(others), curves[trial][number - 1])


class Halving(Pruner):
    """Asynchronous successive halving: after 1, 3, 9, … evaluations, the best third of the trials continues.

    See Li et al., "A System for Massively Parallel Hyperparameter Tuning", MLSys 2020, https://arxiv.org/abs/1810.05934.
    """

    def continues(self, number: int, curves: Sequence[Sequence[float]], trial: int) -> bool:
        if not _is_rung(number):
            return True
        others, own = self._others(number, curves, trial), curves[trial][number - 1]
        num_better = sum(self.objective.is_better(other, own) for other in others)
        return num_better < max(1, (len(others) + 1) // _REDUCTION)


def _is_rung(number: int) -> bool:
    while number % _REDUCTION == 0:
        number //= _REDUCTION
    return number == 1


def mean_curve(curves: Iterable[Sequence[float]]) -> list[float]:
    """Return the mean of `curves` at each evaluation.

    The result is as long as the longest curve. Where a curve has no value anymore, the mean is over the other curves.
    """
    curves = list(curves)
    longest = max(map(len, curves), default=0)
    return [statistics.fmean(curve[i] for curve in curves if len(curve) > i) for i in range(longest)]


PRUNERS: dict[str, type[Pruner]] = {"median": Median, "halving": Halving}
"""The pruner class for each value of `sweep.prune`."""
