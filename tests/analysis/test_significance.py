"""Tests of the comparison over seeds: against scipy's tests, and on simulated runs whose truth is known."""

import math
from statistics import variance

import numpy
import pytest
from scipy import stats

from runner.analysis.significance import LEVEL, Contrast, contrast, corrected

UNRELATED = 100  # added to the seeds of a row, so that it shares none with the other


def by_seed(values: object, first: int = 0) -> dict[int, float]:
    return dict(enumerate(map(float, numpy.asarray(values)), start=first))


def told(measured: dict[int, float], reference: dict[int, float]) -> Contrast:
    found = contrast(measured, reference)
    assert found is not None
    return corrected([found], is_best=True)[0]


# More findings than this among 1,000 equals have a probability below 0.001 if each has 5 %.
MOST_FALSE = stats.binom.ppf(0.999, 1000, LEVEL)


@pytest.mark.parametrize("is_paired", [True, False])
def test_difference_interval_and_p_equal_those_of_scipy(is_paired):
    random = numpy.random.default_rng(1)
    one, other = random.normal(0.9, 0.01, 5), random.normal(0.88, 0.03, 5 if is_paired else 8)
    found = contrast(by_seed(one), by_seed(other, 0 if is_paired else UNRELATED))
    theirs = stats.ttest_rel(one, other) if is_paired else stats.ttest_ind(one, other, equal_var=False)
    assert found is not None
    assert found.is_paired is is_paired
    assert (found.p, found.df) == pytest.approx((theirs.pvalue, theirs.df), rel=1e-9)
    assert (found.low, found.high) == pytest.approx(theirs.confidence_interval(0.95), rel=1e-9)
    assert found.difference == pytest.approx(one.mean() - other.mean())


def test_only_values_of_shared_seeds_are_paired_if_they_are_half_of_the_seeds():
    row = {0: 1.0, 1: 2.5, 2: 3.0, 3: 4.0}
    found = contrast(row, {3: 3.5, 1: 1.0, 9: 7.0})
    assert found is not None
    assert (found.values, found.others, found.is_paired) == ([2.5, 4.0], [1.0, 3.5], True)
    for other in ({3: 3.5, 8: 1.0, 9: 7.0}, {0: 1.0, 1: 2.0, **by_seed(range(6), UNRELATED)}):
        found = contrast(row, other)
        assert found is not None
        assert (len(found.values), len(found.others), found.is_paired) == (4, len(other), False)


@pytest.mark.parametrize("counts", [(1, 1), (1, 5), (5, 1), (0, 3)])
def test_nothing_is_said_with_one_seed(counts):
    for first in (0, UNRELATED):
        assert contrast(by_seed(range(counts[0])), by_seed(range(counts[1]), first)) is None


def test_without_any_variation_the_test_is_one_of_permutations():
    steps = numpy.arange(5) / 100
    same = told(by_seed(0.9 + steps), by_seed(0.9 + steps))
    assert (same.difference, same.p, same.differs, same.seeds_needed) == (0, 1, False, None)
    paired = told(by_seed(0.9 + steps), by_seed(0.8 + steps))  # equal up to the last bits
    assert (paired.p, paired.differs, math.isnan(paired.low)) == (2 / 2**5, False, True)
    groups = told(by_seed([3, 3, 3, 3]), by_seed([2, 2, 2, 2], UNRELATED))
    assert (groups.p, groups.differs) == (2 / math.comb(8, 4), True)
    assert told(by_seed([1, 1, 1, 1, 1]), by_seed([2, 2, 2, 2.5, 2], UNRELATED)).df == pytest.approx(4)


@pytest.mark.parametrize("is_paired", [True, False])
@pytest.mark.parametrize("seeds", [3, 5, 10])
def test_at_most_five_percent_of_a_thousand_equals_are_called_different(is_paired, seeds):
    random = numpy.random.default_rng(seeds)
    found = 0
    for _ in range(1000):
        of_seed = random.normal(size=seeds) if is_paired else 0  # what a seed does to both
        one, other = random.normal(size=seeds) + of_seed, 3 * random.normal(size=seeds) + of_seed
        found += told(by_seed(one), by_seed(other, 0 if is_paired else UNRELATED)).differs
    assert found <= MOST_FALSE


@pytest.mark.parametrize(("rows", "is_best"), [(3, True), (3, False), (10, True)])
def test_at_most_five_percent_of_a_thousand_tables_of_equals_have_a_row_that_is_called_different(rows, is_best):
    random = numpy.random.default_rng(rows)
    found = 0
    for table in random.normal(size=(1000, rows, 4)):
        reference = int(table.mean(1).argmax()) if is_best else 0
        contrasts = [contrast(by_seed(row), by_seed(table[reference])) for row in numpy.delete(table, reference, 0)]
        found += any(each.differs for each in corrected([each for each in contrasts if each], is_best))
    assert found <= MOST_FALSE


def test_corrections_are_those_of_the_literature():
    ps = (0.03, 0.001, 0.02, 0.04)
    contrasts = [Contrast([], [], True, 0, 0, 0, 1, p) for p in ps]
    holm = [each.corrected_p for each in corrected(contrasts, is_best=False)]
    assert holm == pytest.approx([0.06, 0.004, 0.06, 0.06])
    of_pairs = [each.corrected_p for each in corrected(contrasts, is_best=True)]  # of five rows: 10, 6, 4, 4
    assert of_pairs == pytest.approx([0.12, 0.01, 0.12, 0.16])


@pytest.mark.parametrize(("is_paired", "size"), [(True, 0.6), (False, 2.0)])
def test_the_seeds_needed_find_a_difference_of_that_size_as_often_as_predicted(is_paired, size):
    spread = numpy.array([-1.0, 0.0, 1.0])  # of standard deviation 1
    first = 0 if is_paired else UNRELATED
    pilot = told(by_seed(size + (1 if is_paired else 2) * spread), by_seed(0 * spread if is_paired else spread, first))
    seeds = pilot.seeds_needed
    assert seeds is not None

    def power(n: int) -> float:
        total = math.fsum(map(variance, pilot.groups))
        df = (n - 1) * (1 if is_paired else total**2 / (4**2 + 1**2))
        shift, critical = size / math.sqrt(total / n), stats.t.isf(LEVEL / 2, df)
        return float(stats.nct.sf(critical, df, shift) + stats.nct.cdf(-critical, df, shift))

    assert power(seeds) >= 0.8 > power(seeds - 1) - 1e-3
    random, found = numpy.random.default_rng(7), 0
    for _ in range(2000):
        one, other = random.normal(size, 1 if is_paired else 2, seeds), random.normal(size=seeds) * (not is_paired)
        found += told(by_seed(one), by_seed(other, first)).differs
    assert found / 2000 == pytest.approx(power(seeds), abs=0.05)


def test_more_comparisons_need_more_seeds():
    alone = told(by_seed([1.0, 1.2, 0.9, 1.4]), by_seed([0.8, 1.1, 1.0, 0.9]))
    of_nine = corrected([alone] * 9, is_best=False)[0]
    assert (of_nine.seeds_needed or 0) > (alone.seeds_needed or 0) > 4
