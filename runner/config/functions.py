"""Functions and classes of the user: their names, where they are defined, and the arguments that they take."""

from __future__ import annotations

import copy
import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from runner.config.errors import ConfigError, check, described, shown

_TARGETS = re.compile(r"y|(y_)?(true|targets?|labels?|truth|ground_truth|gt|actual)")
_OUTPUTS = re.compile(r"(y_)?(pred\w*|scores?|prob\w*|hat|outputs?|logits|inputs?)")


def name_of(value: Any) -> str:
    """Return the name of a class or function, or of the class of an object, with its module."""
    if isinstance(value, Mapping):
        return ", ".join(map(str, value))
    if isinstance(value, list | tuple):
        return ", ".join(name_of(each) for each in value[:2])
    named = value if hasattr(value, "__qualname__") and hasattr(value, "__module__") else type(value)
    return f"{named.__module__}.{named.__qualname__}".removeprefix("builtins.").replace("<locals>.", "")


def place(function: Any) -> str:
    """Return where a function, or the class of another callable object, is defined, as ` (mine.py:12)`, if known."""
    while isinstance(function, functools.partial):
        function = function.func
    found = inspect.unwrap(function)
    try:
        source = found if hasattr(found, "__code__") or inspect.isclass(found) else type(found)
        return f" ({shown(str(inspect.getsourcefile(source)))}:{inspect.getsourcelines(source)[1]})"
    except (OSError, TypeError):  # of a function in C, or of what is typed in a console
        return ""


def check_function(key: str, function: Any, arguments: Sequence[str], body: str = "…") -> None:
    """Raise a `ConfigError` with `key` unless `function` can be called with `arguments`; `body` is an example."""
    try:
        inspect.signature(function).bind(*arguments)
    except (TypeError, ValueError):  # ValueError: of a function in C, whose arguments are not known
        why = f"it is no function of ({', '.join(arguments)}){place(function)}"
        remedy = f"def {key.rpartition('.')[2]}({', '.join(arguments)}): {body}"
        raise ConfigError(key, name_of(function), why, remedy) from None


def own_copy(key: str, value: Any, remedy: str, make: Callable[[Any], Any] = copy.deepcopy) -> Any:
    """Return a copy of an object of the user, which the run may change.

    Raises:
        ConfigError: with `key` and `remedy`, if it cannot be copied.
    """
    try:
        return make(value)
    except Exception as error:  # of any type: it holds a file or a lock, for example
        raise ConfigError(key, name_of(value), f"it cannot be copied: {described(error)}", remedy) from error


def check_order(key: str, function: Any) -> None:
    """Raise a `ConfigError` with `key` if `function` takes (targets, outputs) by name, as those of scikit-learn do."""
    try:
        first, second = [*inspect.signature(getattr(function, "forward", function)).parameters][:2]
    except (TypeError, ValueError):
        return
    is_other = _TARGETS.fullmatch(first.lower()) and _OUTPUTS.fullmatch(second.lower())
    remedy = f"lambda outputs, targets: {getattr(function, '__name__', 'it')}(targets, outputs)"
    why = f"its arguments are ({first}, {second}), and it is called with (outputs, targets)"
    check(not is_other, key, name_of(function), why, remedy)
