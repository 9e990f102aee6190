"""Random number generators that a data set holds: they are seeded for each sample, as the global ones are."""

from __future__ import annotations

import functools
import random
import sysconfig
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

from runner.seeds import derive

_MAX_OBJECTS, _MAX_ITEMS = 500, 64
KINDS = (np.random.Generator, np.random.BitGenerator, np.random.RandomState, random.Random, torch.Generator)
_LEAVES = (torch.Tensor, np.ndarray, str, bytes, int, float, complex, type(None), ModuleType)
_LIBRARIES = ("-packages/", f"{sysconfig.get_path('stdlib')}/", "<frozen")


def generators_of(root: Any) -> list[Any]:
    """Return the generators of NumPy, `random` and torch that `root` holds, always in the same order.

    They are searched for in attributes of objects, as of transforms and of data sets inside; in short lists, tuples and
    mappings; and in what functions and classes refer to, unless they are those of a library.
    """
    found, seen, waiting = [], dict[int, Any](), deque([root])
    while waiting and len(seen) < _MAX_OBJECTS:
        each = waiting.popleft()
        if isinstance(each, _LEAVES) or id(each) in seen:
            continue
        seen[id(each)] = each  # kept, as the identity of one that is gone may be that of the next
        if isinstance(each, KINDS):
            found.append(each)
        else:
            waiting += _held_by(each)
    return found


def seed_all(generators: Iterable[Any], seed: int) -> None:
    """Let each of `generators` draw from a seed of its own, derived from `seed`."""
    for number, generator in enumerate(generators):
        own = derive(seed, "generator", number)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(own)
        elif isinstance(generator, random.Random):
            generator.seed(own)
        else:
            bits = getattr(generator, "bit_generator", getattr(generator, "_bit_generator", generator))
            with suppress(Exception):  # of a bit generator of another kind, which `Fetch` finds to draw other numbers
                bits.state = type(bits)(own).state


def states_of(generators: Iterable[Any]) -> list[Any]:
    """Return the states of `generators`, for `set_states`; None of one that has none."""
    return [_state(each) for each in generators]


def set_states(generators: Iterable[Any], states: Iterable[Any]) -> None:
    """Set `generators` to what `states_of` returned."""
    for generator, state in zip(generators, states, strict=True):
        if state is None:
            continue
        if hasattr(generator, "set_state"):
            generator.set_state(state)
        elif isinstance(generator, random.Random):
            generator.setstate(state)
        else:
            getattr(generator, "bit_generator", generator).state = state


def _state(generator: Any) -> Any:
    if hasattr(generator, "get_state"):  # of torch, or an older one of NumPy
        return generator.get_state()
    if isinstance(generator, random.Random):
        return None if isinstance(generator, random.SystemRandom) else generator.getstate()
    return getattr(generator, "bit_generator", generator).state


def _held_by(value: Any) -> Iterable[Any]:
    if isinstance(value, dict | list | tuple):  # no other mapping, as of HDF5: it may be a file, which may be closed
        return [] if len(value) > _MAX_ITEMS else [*value.values()] if isinstance(value, dict) else value
    if isinstance(value, FunctionType):
        if not _is_of_the_user(value):
            return []
        names = (value.__globals__.get(name) for name in value.__code__.co_names)
        return [*(value.__closure__ or ()), *names, *(value.__defaults__ or ())]
    if isinstance(value, CellType):
        with suppress(ValueError):  # it is empty
            return [value.cell_contents]
        return []
    if isinstance(value, type):
        held = [getattr(each, "fget", getattr(each, "__func__", each)) for each in vars(value).values()]
        functions = [each for each in held if isinstance(each, FunctionType)]
        return held if any(map(_is_of_the_user, functions)) else []
    if isinstance(value, MethodType | functools.partial):
        return [getattr(value, name, None) for name in ("__self__", "__func__", "func", "args", "keywords")]
    return [*getattr(value, "__dict__", {}).values(), *type(value).__mro__]


def _is_of_the_user(function: FunctionType) -> bool:
    return not is_library(function.__code__.co_filename)


def is_library(path: str) -> bool:
    """Return whether the file at `path` is one of an installed package, or of Python's own library."""
    return any(library in path for library in _LIBRARIES)
