"""The dimensions of a sweep: lists of values to combine, and intervals to search."""

from __future__ import annotations

import math
from typing import NamedTuple


class Interval(NamedTuple):
    """An interval of numbers from which a search samples values.

    Args:
        low: the lowest value.
        high: the highest value.
        log: whether values are sampled on a logarithmic scale.
        whole: whether the values are integers.
    """

    low: float
    high: float
    log: bool = False
    whole: bool = False


class Dimension(NamedTuple):
    """The values of one key of a sweep, or of several keys whose values are paired.

    Args:
        name: the config key, or the name that the user gave to the paired keys.
        keys: the config keys that the dimension sets.
        choices: the values; each value is a list of the overrides that set it. `[[]]` if there is an `interval`.
        interval: the interval that a search samples instead of `choices`; None if the values are listed.
    """

    name: str
    keys: tuple[str, ...]
    choices: list[list[str]]
    interval: Interval | None = None

    @property
    def values(self) -> list[list[str]]:
        """The overrides that set each value. The values of an interval of integers are listed, too."""
        if self.interval is None:
            return self.choices
        assert self.interval.whole
        return [[f"{self.name}={value}"] for value in range(int(self.interval.low), int(self.interval.high) + 1)]

    @property
    def num_values(self) -> float:
        """The number of values; infinite if real numbers are searched."""
        if self.interval is None:
            return len(self.choices)
        return self.interval.high - self.interval.low + 1 if self.interval.whole else math.inf

    @property
    def first(self) -> list[str]:
        """The overrides that set the first value of the list, or the lowest value of the interval."""
        return self.choices[0] if self.interval is None else [f"{self.name}={self.interval.low}"]

    def contains(self, word: str) -> bool:
        """Return whether `word` is one of the overrides that set a value of this dimension."""
        if self.interval is None:
            return any(word in words for words in self.choices)
        name, _, value = word.partition("=")
        try:
            return name == self.name and self.interval.low <= float(value) <= self.interval.high
        except ValueError:
            return False

    @property
    def varies(self) -> bool:
        """Whether the dimension has several values."""
        return len(self.choices) > 1 or self.interval is not None
