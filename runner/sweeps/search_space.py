"""The dimensions of a sweep, which are lists of values and intervals, and the combinations that a search may try."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import cached_property
from typing import NamedTuple

from runner.config.overrides import override_key
from runner.sweeps.engines.base import MAX_TRIALS


class Interval(NamedTuple):
    """An interval of numbers, or of `whole` numbers, from which a search samples, perhaps on a logarithmic scale."""

    low: float
    high: float
    log: bool = False
    whole: bool = False


class Dimension(NamedTuple):
    """The values of one key of a sweep, or of several keys whose values are paired."""

    name: str  # the config key, or the name that the user gave to the paired keys
    keys: tuple[str, ...]  # the config keys that the dimension sets
    choices: list[list[str]]  # for each value, the overrides that set it; `[[]]` if there is an interval instead
    interval: Interval | None = None

    @property
    def values(self) -> list[list[str]]:
        """The overrides that set each value. The values of an interval of integers are listed, too."""
        if self.interval is None:
            return self.choices
        assert self.interval.whole
        return [[f"{self.name}={value}"] for value in range(int(self.interval.low), int(self.interval.high) + 1)]

    @property
    def examples(self) -> list[list[str]]:
        """The overrides that set each value; of an interval, those of its lower end."""
        if self.interval is None:
            return self.choices
        low = self.interval.low
        return [[f"{self.name}={int(low) if self.interval.whole else low!r}"]]

    @property
    def num_values(self) -> float:
        """The number of values; infinite if real numbers are searched."""
        if self.interval is None:
            return len(self.choices)
        return self.interval.high - self.interval.low + 1 if self.interval.whole else math.inf

    def contains(self, word: str) -> bool:
        """Return whether `word` is one of the overrides that set a value of this dimension."""
        if self.interval is None:
            return any(word in words for words in self.choices)
        name, _, text = word.partition("=")
        with suppress(ValueError):
            value = int(text) if self.interval.whole else float(text)
            return name == self.name and repr(value) == text and self.interval.low <= value <= self.interval.high
        return False

    @property
    def varies(self) -> bool:
        return len(self.choices) > 1 or self.interval is not None


class Space:
    """The combinations of values that a search may try.

    Args:
        dimensions: the dimensions of the sweep, including dimensions with a single value.
        exists: returns whether the config that is composed with some overrides of config groups has a key.
        groups: the names of all config groups.
    """

    def __init__(self, dimensions: list[Dimension], exists: Callable[[list[str], str], bool], groups: Collection[str]):
        self.dimensions = sorted(dimensions, key=lambda each: not _sets_group(each, groups))
        self._groups, self._exists = groups, exists

    def overrides(self, value: Callable[[Dimension], list[str]]) -> list[str]:
        """Return the overrides of one combination, of which `value` chooses those of each dimension.

        The options of the config groups are chosen first. Other keys, which they do not have, are left out, unless they
        are typed with a plus.
        """
        words: list[str] = []
        chosen: list[str] = []
        for each in self.dimensions:
            if _sets_group(each, self._groups):
                chosen += value(each)
            elif all(self._exists(chosen, override_key(word)) for word in each.examples[0] if word[0] != "+"):
                words += value(each)
        return [*chosen, *words]

    @cached_property
    def combinations(self) -> list[list[str]] | None:
        """The overrides of each distinct combination; None if there are more than a search can try."""
        if math.prod(each.num_values for each in self.dimensions) > MAX_TRIALS:
            return None
        found: dict[tuple[str, ...], list[str]] = {}
        for combination in itertools.product(*(each.values for each in self.dimensions)):
            by_name = {each.name: words for each, words in zip(self.dimensions, combination, strict=True)}
            overrides = self.overrides(lambda each, by_name=by_name: by_name[each.name])
            found[tuple(overrides)] = overrides
        return [*found.values()]

    def contains(self, overrides: object) -> bool:
        """Return whether `overrides`, of any type because somebody else may have written them, set values in here."""
        return isinstance(overrides, list) and all(
            isinstance(word, str) and any(each.contains(word) for each in self.dimensions) for word in overrides
        )

    def __repr__(self) -> str:
        return json.dumps(self.dimensions)


def _sets_group(dimension: Dimension, groups: Collection[str]) -> bool:
    return any(key.partition("@")[0] in groups for key in dimension.keys)
