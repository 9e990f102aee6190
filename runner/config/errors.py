"""Config errors that a person can act on: which key, what was got, why it cannot be, and what to type instead."""

from __future__ import annotations

import difflib
import enum
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from runner.config.options import option_file


class ConfigError(Exception):
    """The config cannot run: which key, what was got, why that cannot be, and what to do instead.

    Raised by components with the bare name of their field; `build` puts the group's name before it, so that the user
    reads the key that they would type.
    """

    def __init__(self, key: str, got: object, why: str, remedy: str):
        super().__init__(key, got, why, remedy)
        self.key, self.got, self.why, self.remedy = key, got, why, remedy

    def __str__(self) -> str:
        got = "" if self.got is ABSENT else f" got {_shown(self.got)}:"
        return f"{self.key}:{got} {self.why}\n  {self.remedy}"


class _Absent(enum.Enum):  # an enum, as its member is the same object after a pickle's journey to another process
    ABSENT = enum.auto()


ABSENT = _Absent.ABSENT
"""In place of a value, where there is none to show."""


def check(ok: bool, key: str, got: object, why: str, remedy: str) -> None:
    """Raise `ConfigError` unless `ok`."""
    if not ok:
        raise ConfigError(key, got, why, remedy)


def check_range(
    component: object,
    key: str,
    above: float = -math.inf,
    least: float = -math.inf,
    most: float = math.inf,
    below: float = math.inf,
) -> None:
    """Refuse a number of `component` that is not finite, outside (`above`, `below`), or outside [`least`, `most`]."""
    value = getattr(component, key)
    if value is None or (math.isfinite(value) and above < value < below and least <= value <= most):
        return
    bounds = (("> ", above), ("≥ ", least), ("≤ ", most), ("< ", below))
    wanted = [
        f"{word}{bound if isinstance(bound, int) else f'{bound:g}'}" for word, bound in bounds if math.isfinite(bound)
    ]
    raise ConfigError(key, value, "it must be a finite number " + " and ".join(wanted), see_comments(component))


def check_choice(component: object, key: str, choices: Iterable[str]) -> None:
    """Refuse a string of `component` that is none of `choices`."""
    value, choices = getattr(component, key), list(choices)
    if value not in choices:
        raise ConfigError(key, value, f"it is none of {', '.join(choices)}", did_you_mean(value, choices))


def did_you_mean(word: str, known: Iterable[str], before: str = "") -> str:
    """A sentence that names the nearest of `known`, or all of them when none is near; each with `before` before it."""
    spelled = {name.lower(): before + name for name in sorted(known)}
    near = difflib.get_close_matches(word.lower(), spelled, n=3, cutoff=0.6)
    if near:
        return f"did you mean {' or '.join(spelled[name] for name in near)}?"
    return f"known are: {', '.join(spelled.values())}" if spelled else "it has none"


@contextmanager
def errors_under(key: str) -> Iterator[None]:
    """Put `key` before the keys of the config errors raised inside: a component does not know where it stands."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{key}.{error.key}", error.got, error.why, error.remedy) from None


def see_comments(component: object) -> str:
    """The remedy that names the file whose comments explain the options of `component`, an object or a class."""
    cls = component if isinstance(component, type) else type(component)
    return f"see the comments in {option_file(cls)}"


def _shown(value: object) -> str:
    text = "null" if value is None else repr(value)
    return text if len(text) <= 80 else text[:77] + "…"
