"""The limits of options, as part of their types: `Annotated[float, Range(least=0)]`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from runner.config.errors import ConfigError, see_comments


@dataclass(frozen=True)
class Range:
    """The finite numbers > `above`, ≥ `least`, ≤ `most` and < `below`."""

    above: float = -math.inf
    least: float = -math.inf
    most: float = math.inf
    below: float = math.inf

    def __contains__(self, value: float) -> bool:
        is_finite = isinstance(value, int) or math.isfinite(value)  # an int may be too large for a float
        return is_finite and self.above < value < self.below and self.least <= value <= self.most

    def __str__(self) -> str:
        bounds = (("> ", self.above), ("≥ ", self.least), ("≤ ", self.most), ("< ", self.below))
        finite = [(word, bound) for word, bound in bounds if math.isfinite(bound)]
        return " and ".join(f"{word}{bound if isinstance(bound, int) else f'{bound:g}'}" for word, bound in finite)


LARGEST = 2**31 - 1
"""The largest of numbers that count something, such as steps or samples; a larger one is a typo."""

PositiveInt = Annotated[int, Range(least=1, most=LARGEST)]
NonNegativeInt = Annotated[int, Range(least=0, most=LARGEST)]
NumThreads = Annotated[int, Range(least=1, most=1024)]
Fraction = Annotated[float, Range(least=0, most=1)]


def check_range(component: object, key: str, limits: Range) -> None:
    """Check that the attribute `key` of `component` is within `limits`, which depend on other options.

    Raises:
        ConfigError: otherwise.
    """
    value = getattr(component, key)
    word = "a whole number" if isinstance(value, int) else "a finite number"
    if value not in limits:  # or each start would search the option files for the remedy
        raise ConfigError(key, value, f"it must be {word} {limits}", see_comments(component, key))
