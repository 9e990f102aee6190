"""Values that code of the user keeps: numbers, texts, tensors, arrays, generators, and lists and dicts of them."""

from __future__ import annotations

import ast
import math
from collections import deque
from collections.abc import Callable
from itertools import count, zip_longest
from typing import Any

import numpy as np
import torch

from runner.data.generators import KINDS, set_states, states_of
from runner.parallel.collectives import bytes_of

MAX_ITEMS, _MAX_NUMBERS = 10_000, 1 << 18
PLAIN = (bool, int, float, complex, str, bytes, type(None))


def is_state(value: Any) -> bool:
    """Return whether a value is made of numbers, texts, tensors and generators, and is not large, as data are."""
    return _size(value) <= _MAX_NUMBERS


def _size(value: Any) -> float:
    """Return how many numbers a value has; infinity if it is something else, or a tensor that is trained."""
    if isinstance(value, torch.Tensor):
        is_plain = type(value) is torch.Tensor and value.layout == torch.strided and value.is_leaf
        return value.numel() if is_plain and not value.requires_grad and not hasattr(value, "fake_mode") else math.inf
    if isinstance(value, np.ndarray):
        return value.size if value.dtype.kind in "biufc" else math.inf
    if isinstance(value, dict | list | tuple | set | deque):
        if len(value) > MAX_ITEMS or (isinstance(value, dict) and not all(isinstance(key, PLAIN) for key in value)):
            return math.inf
        return sum(map(_size, value.values() if isinstance(value, dict) else value))
    return 1 if isinstance(value, (*PLAIN, np.generic, count, *KINDS)) else math.inf


def mark(value: Any) -> Any:
    """Return what tells whether a value has changed."""
    if isinstance(value, torch.Tensor):
        content = bytes_of(value).cpu()  # a plan, in which nothing is computed, has none
        return str(value.dtype), tuple(value.shape), hasattr(content, "fake_mode") or content.numpy().tobytes()
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, KINDS):
        return mark(_plain(states_of([value])[0]))
    if isinstance(value, count):
        return repr(value)
    if isinstance(value, dict):
        return [(repr(key), mark(each)) for key, each in value.items()]
    if isinstance(value, list | tuple | set | deque):
        return [*map(mark, value)]
    return type(value).__name__, repr(value)


def restorer(value: Any) -> Callable[[], Any]:
    """Return a function that gives `value` the content that it has now, and returns it.

    A tensor is only written if it has changed: it may share its memory with a weight.
    """
    if isinstance(value, KINDS):
        states = states_of([value])
        return lambda: set_states([value], states) or value
    if isinstance(value, torch.Tensor | np.ndarray):
        before, content = mark(value), value.clone() if isinstance(value, torch.Tensor) else value.copy()

        def written() -> Any:
            with torch.no_grad():
                if mark(value) != before:
                    value[...] = content  # pyright: ignore[reportArgumentType]
            return value

        return written
    if isinstance(value, dict):
        parts = {key: restorer(each) for key, each in value.items()}
        return lambda: _refilled(value, {key: restore() for key, restore in parts.items()})
    if isinstance(value, count):
        numbers = _numbers(value)
        return lambda: count(*numbers)
    if isinstance(value, list | tuple | set | deque):
        items = [*map(restorer, value)]
        return lambda: _refilled(value, [restore() for restore in items])
    return lambda: value


def _refilled(value: Any, content: Any) -> Any:
    """Return the container `value` with this content; a tuple, which cannot be changed, as it is."""
    if not isinstance(value, tuple):
        value.clear()
        (value.update if isinstance(value, dict | set) else value.extend)(content)
    return value


def packed(value: Any) -> Any:
    """Return a value as a checkpoint holds it; raises a `TypeError` if it has texts, which might be commands."""
    if isinstance(value, KINDS):
        return packed(_plain(states_of([value])[0]))
    if isinstance(value, count):
        return _numbers(value)
    if isinstance(value, torch.Tensor):
        return value.to("cpu", copy=True).contiguous()
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    if isinstance(value, dict):
        return {key: packed(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | deque):
        return [*map(packed, value)]
    value = value.item() if isinstance(value, np.generic) else value
    if not is_saved(value):
        raise TypeError(type(value).__name__)
    return value


def _numbers(value: count) -> list[Any]:
    """Return the next number of a counter, and its step, which only its text tells."""
    return [*ast.literal_eval(f"[{repr(value).partition('(')[2][:-1]}]")]


def _plain(state: Any) -> Any:
    """Return the state of a generator without texts, which name its kind."""
    if not isinstance(state, dict):
        return [each for each in state if not isinstance(each, str)] if isinstance(state, tuple) else state
    return {key: _plain(each) for key, each in state.items() if not isinstance(each, str)}


def _like(state: Any, now: Any) -> Any:
    """Return the saved `state` of a generator with the texts, and in the form, of the one that it has `now`."""
    if isinstance(now, dict):
        return {key: each if isinstance(each, str) else _like(state[key], each) for key, each in now.items()}
    if isinstance(now, tuple):
        rest = iter(state)
        return tuple(each if isinstance(each, str) else _like(next(rest), each) for each in now)
    return state.numpy() if isinstance(now, np.ndarray) else state


def is_saved(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(is_saved, value.values()))
    if isinstance(value, list):
        return all(map(is_saved, value))
    return type(value) in (torch.Tensor, bool, int, float, type(None))


def unpacked(saved: Any, now: Any, device: torch.device) -> Any:
    """Return the value that `packed` returned as `saved`, in the form of the value that the code has `now`."""
    if isinstance(now, KINDS):
        set_states([now], [_like(saved, states_of([now])[0])])
        return now
    if isinstance(now, count):
        return count(*saved)
    if isinstance(saved, torch.Tensor):
        if isinstance(now, np.ndarray | np.generic):
            return saved.numpy()
        return saved.to(now.device if isinstance(now, torch.Tensor) else device, copy=True)  # it is mapped to a file
    if isinstance(saved, dict):
        found = now if isinstance(now, dict) else {}
        return _refilled(found, {key: unpacked(each, found.get(key), device) for key, each in saved.items()})
    if isinstance(saved, list):
        parts = [*now] if isinstance(now, list | tuple | deque) else []
        items = [unpacked(each, part, device) for each, part in zip_longest(saved, parts[: len(saved)])]
        return tuple(items) if isinstance(now, tuple) else _refilled(now if _is_container(now) else [], items)
    return type(now)(saved) if isinstance(now, np.generic) else saved


def _is_container(value: Any) -> bool:
    return isinstance(value, list | set | deque)
