"""The mean and the standard deviation of repeated measurements."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from typing import NamedTuple


class Spread(NamedTuple):
    """The mean and the sample standard deviation of repeated measurements; for a single value, `deviation` is NaN."""

    mean: float
    deviation: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Return the mean and the sample standard deviation of one or more `values`."""
        values = list(values)
        return cls(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else math.nan)

    def __str__(self) -> str:
        """Return `mean ± deviation`, both with the same number of decimals.

        The number of decimals is the largest for which the deviation has at most two significant digits, and the mean
        at most five. A single value has at most four significant digits.
        """
        if math.isnan(self.deviation):
            return f"{self.mean:.4g}"
        largest = max(self.deviation, abs(self.mean) / 1000)
        digits = max(0, 1 - math.floor(math.log10(largest))) if largest else 1
        return f"{self.mean:.{digits}f} ± {self.deviation:.{digits}f}"
