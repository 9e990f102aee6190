"""The generators of random numbers of `random`, NumPy and torch on the CPU, for code that draws beside other code."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class OwnGenerators:
    """States of `random`, NumPy's generator and torch's on the CPU for code that draws from them beside other code."""

    def __init__(self) -> None:
        self._states = _host_states()

    @contextmanager
    def drawing(self, seed: int | None = None) -> Iterator[None]:
        """A context in which the generators have these states, or begin with `seed`; then, they go on as before."""
        with _as_before():
            if seed is None:
                _set_host_states(self._states)
            else:
                seed_host(seed)
            try:
                yield
            finally:
                self._states = _host_states()


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """A context in which `random`, NumPy and torch on the CPU draw from `seed`; then, they go on as before."""
    with _as_before():
        seed_host(seed)
        yield


def seed_host(seed: int) -> None:
    """Let `random`, NumPy and torch on the CPU draw from `seed`."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if numpy_random := numpy_generator():
        numpy_random.seed(seed & 0xFFFFFFFF)


@contextmanager
def _as_before() -> Iterator[None]:
    before = _host_states()
    try:
        yield
    finally:
        _set_host_states(before)


def _host_states() -> tuple[Any, ...]:
    numpy_random = numpy_generator()  # not `random_states`, whose tensors have no values while a run is planned
    return torch.get_rng_state(), random.getstate(), numpy_random and numpy_random.get_state()


def _set_host_states(states: tuple[Any, ...]) -> None:
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    if states[2] and (numpy_random := numpy_generator()):
        numpy_random.set_state(states[2])


def numpy_generator() -> Any:
    """Return `numpy.random`; None if NumPy is not imported, or the user has given it another kind of generator."""
    found = getattr(sys.modules.get("numpy"), "random", None)
    return found if found and isinstance(found.get_bit_generator(), found.MT19937) else None
