"""What a sweep varies: values that are combined, and intervals that are searched."""

from __future__ import annotations

from typing import NamedTuple


class Interval(NamedTuple):
    """The bounds of a search.

    Args:
        low: the lowest value.
        high: the highest value.
        log: whether the logarithm of the value is searched.
        whole: whether the values are whole numbers.
    """

    low: float
    high: float
    log: bool = False
    whole: bool = False


class Dimension(NamedTuple):
    """The values of one key of a sweep, or of several keys whose values are paired.

    Args:
        name: the key, or the name of the pairs.
        keys: the keys that it sets.
        choices: the overrides of each of its values; a single one if it does not vary.
        interval: the bounds of a search, instead of `choices`.
    """

    name: str
    keys: tuple[str, ...]
    choices: list[list[str]]
    interval: Interval | None = None

    @property
    def first(self) -> list[str]:
        """The overrides of its first value, or of the lowest one of an interval."""
        return self.choices[0] if self.interval is None else [f"{self.name}={self.interval.low}"]

    @property
    def varies(self) -> bool:
        """Whether it has several values."""
        return len(self.choices) > 1 or self.interval is not None
