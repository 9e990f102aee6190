"""Functions of Hydra's grammar that list values, in place of Hydra's own, whose values are not what is typed.

Hydra reads the types of their arguments from the annotations, which must not be texts.
"""

import functools
import itertools
import random
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser, create_functions
from hydra.core.override_parser.types import ChoiceSweep, RangeSweep

MAX_JOBS = 10_000
"""The maximum number of jobs in a sweep. A larger sweep is probably a typing error, or should be divided."""


def parser(loader: Any) -> OverridesParser:
    """Return a parser of overrides in Hydra's grammar; `loader` is Hydra's config loader."""
    return OverridesParser(_functions(), loader)


@functools.cache  # a sweep parses several times a job, and reading the signatures takes a millisecond
def _functions() -> Any:
    functions = create_functions()
    for name, function in (("range", listed_range), ("shuffle", shuffled)):
        del functions.definitions[name]
        functions.register(name, function)
    return functions


def listed_range(start: Any, stop: Any = None, step: Any = 1) -> ChoiceSweep | RangeSweep:
    """Return the values from `start` up to but not including `stop`, computed in decimal numbers, as they are typed.

    A range may have billions of values: no more than one beyond `MAX_JOBS` is listed. What is no range is returned as
    one of Hydra, which lists nothing.
    """
    start, stop = (0, start) if stop is None else (start, stop)
    numbers = start, stop, step
    if not all(type(number) in (int, float) and abs(number) < float("inf") for number in numbers) or step == 0:
        return RangeSweep(start=start, stop=stop, step=step)
    if all(type(number) is int for number in numbers):
        return ChoiceSweep(list=[*range(start, stop, step)[: MAX_JOBS + 1]])
    return ChoiceSweep(
        list=[*itertools.islice(_decimals(*(Decimal(repr(number)) for number in numbers)), MAX_JOBS + 1)]
    )


def _decimals(start: Decimal, stop: Decimal, step: Decimal) -> Iterator[float]:
    for count in itertools.count():
        value = start + count * step
        if value >= stop if step > 0 else value <= stop:
            return
        yield float(value)


def shuffled(*values: Any, sweep: Any = None, list: Any = None) -> Any:
    """Return a list, or the values of a sweep, in an order that follows from them: it is the same in a resume."""
    given = next((each for each in (sweep, list) if each is not None), values[0] if len(values) == 1 else [*values])
    if isinstance(given, RangeSweep):
        return given
    items = [*given.list] if isinstance(given, ChoiceSweep) else [*given] if isinstance(given, type([])) else [given]
    random.Random(repr(items)).shuffle(items)
    return ChoiceSweep(list=items) if isinstance(given, ChoiceSweep) or len(values) > 1 else items
