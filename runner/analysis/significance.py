"""Whether measurements with several seeds differ: t-tests, their correction for several of them, and their power."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from statistics import fmean, variance
from typing import Any, NamedTuple

LEVEL = 0.05
"""The probability with which a difference is found among equals, over all comparisons together."""
POWER = 0.8
"""The probability with which a difference of the size seen would be found with `seeds_needed` seeds."""
MAX_SEEDS = 100_000


class Contrast(NamedTuple):
    """A measurement compared with a reference, over seeds.

    Args:
        values: the measurement, one value for each seed that is compared.
        others: the reference; if `is_paired`, the value at each index has the same seed as that in `values`.
        is_paired: whether the differences of each seed are tested, or the two groups.
        difference: the mean of `values` minus that of `others`.
        low, high: the limits of the 95 % confidence interval of the difference; NaN if nothing varies with the seed.
        df: the degrees of freedom of the t-test; NaN if nothing varies with the seed.
        p: the two-sided p-value, by itself.
        family: how many comparisons have to be allowed for (see `corrected`).
        corrected_p: the p-value after the correction.
    """

    values: list[float]
    others: list[float]
    is_paired: bool
    difference: float
    low: float
    high: float
    df: float
    p: float
    family: int = 1
    corrected_p: float = math.nan

    @property
    def test(self) -> str:
        if math.isnan(self.df):
            return "exact permutation test"
        return "paired t-test" if self.is_paired else "Welch's t-test"

    @property
    def differs(self) -> bool:
        """Whether the two differ at `LEVEL`."""
        return self.corrected_p < LEVEL

    @property
    def groups(self) -> list[list[float]]:
        """The numbers that are tested: the differences of each seed, or the two groups."""
        if self.is_paired:
            return [[value - other for value, other in zip(self.values, self.others, strict=True)]]
        return [self.values, self.others]

    @property
    def seeds_needed(self) -> int | None:
        """How many seeds each side needs to find a difference of this size with `POWER`; None if over `MAX_SEEDS`.

        The power is that of the noncentral t distribution (Cohen, Statistical Power Analysis, 1988). None also if there
        is no t-test.
        """
        if math.isnan(self.df):
            return None
        from scipy.special import nctdtr, stdtrit

        spreads = list(map(variance, self.groups))
        total = math.fsum(spreads)
        df_of_two = total**2 / math.fsum(spread**2 for spread in spreads)

        def has_power(seeds: int) -> bool:
            df, shift = df_of_two * (seeds - 1), abs(self.difference) / math.sqrt(total / seeds)
            return not nctdtr(df, shift, stdtrit(df, 1 - LEVEL / self.family / 2)) > 1 - POWER  # NaN for large shifts

        found = 2 + bisect_left(range(2, MAX_SEEDS + 1), True, key=has_power)
        return found if found <= MAX_SEEDS else None


def contrast(measured: Mapping[Any, float], reference: Mapping[Any, float]) -> Contrast | None:
    """Compare two measurements, each given by seed; None if there are too few seeds to say anything.

    If at least two seeds, and at least half of those of each side, are shared, the differences of the shared seeds are
    tested (paired t-test). Otherwise, all values are tested as two groups that may vary by different amounts (Welch,
    The generalization of Student's problem, 1947). If nothing varies with the seed, t is infinite or undefined: then
    the p-value is that of the permutation test, which is exact, and at least 2^(1 − seeds).
    """
    shared = [seed for seed in measured if seed in reference]
    is_paired = len(shared) > 1 and 2 * len(shared) >= max(len(measured), len(reference))
    values, others = list(measured.values()), list(reference.values())
    if is_paired:
        values, others = [measured[seed] for seed in shared], [reference[seed] for seed in shared]
    if min(len(values), len(others)) < 2:
        return None
    found = Contrast(values, others, is_paired, fmean(values) - fmean(others), math.nan, math.nan, math.nan, 1.0)
    errors = [variance(group) / len(group) for group in found.groups]
    error = math.sqrt(math.fsum(errors))
    rounding = 1e-12 * max(map(abs, [*values, *others]))
    if error <= rounding:
        arrangements = 2 ** len(values) if is_paired else math.comb(len(values) + len(others), len(others))
        return found if abs(found.difference) <= rounding else found._replace(p=2 / arrangements)
    from scipy.special import stdtr, stdtrit

    squares = math.fsum(each**2 / (len(group) - 1) for each, group in zip(errors, found.groups, strict=True))
    df = math.fsum(errors) ** 2 / squares
    width = stdtrit(df, 0.975) * error
    p = 2 * stdtr(df, -abs(found.difference) / error)
    low, high = float(found.difference - width), float(found.difference + width)
    return found._replace(low=low, high=high, df=df, p=float(p))


def corrected(contrasts: Sequence[Contrast], is_best: bool) -> list[Contrast]:
    """Return contrasts with one reference, with `corrected_p`: the probability of one or more false findings is 5 %.

    If the reference was chosen beforehand, this is Holm's step-down correction (1979). If it was found to be the best
    (`is_best`), any pair of rows might have been compared. After r findings, r rows are known to differ from the best:
    then at most all pairs of the n − r others, and all of the r, may be equal (Shaffer, Modified sequentially rejective
    multiple test procedures, 1986). With Holm's numbers, about one in ten tables of ten equal rows would have one.
    """
    done, largest, family, count = list(contrasts), 0.0, 1, len(contrasts)
    for rank, index in enumerate(sorted(range(count), key=lambda i: contrasts[i].p)):
        allowed_for = math.comb(count + 1 - rank, 2) + math.comb(rank, 2) if is_best else count - rank
        if largest < LEVEL:  # otherwise, nothing more is found, and nothing more is known
            family = allowed_for
        largest = min(1.0, max(largest, allowed_for * contrasts[index].p))
        done[index] = contrasts[index]._replace(family=family, corrected_p=largest)
    return done
