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

    @property
    def bar(self) -> float:
        """Half the length of an error bar, that is, the standard deviation; 0 for a single value."""
        return 0.0 if math.isnan(self.deviation) else self.deviation
