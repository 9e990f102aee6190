"""The generators of random numbers of `random`, NumPy and torch on the CPU, for code that draws beside other code."""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from runner.system import accelerator


class OwnGenerators:
    """States of `random`, NumPy's generator and torch's on the CPU for code that draws from them beside other code."""

    def __init__(self) -> None:
        self._states = _host_states()

    @contextmanager
    def drawing(self, seed: int | None = None) -> Iterator[None]:
        """A context in which the generators have these states, or begin with `seed`; then, they go on as before."""
        before = _host_states()
        try:
            if seed is None:
                _set_host_states(self._states)
            else:
                seed_host(seed)
            yield
        finally:
            self._states = _host_states()
            _set_host_states(before)


class OwnTurn:
    """These generators, and those of devices, of code that takes turns with other code: `end` keeps them until `begin`.

    NumPy's is exchanged for one of its own, as a copy of its state takes longer than a step of a small network.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices, self._numpy = [device for device in devices if device.type != "cpu"], None
        if numpy_random := numpy_generator():
            self._numpy = numpy_random.MT19937(0)
            self._numpy.state = numpy_random.get_state(legacy=False)
            numpy_random.set_bit_generator(self._numpy)

    def end(self) -> None:
        self._torch, self._random = torch.get_rng_state(), random.getstate()
        self._of_devices = [accelerator.random_state(device) for device in self._devices]

    def begin(self) -> None:
        torch.set_rng_state(self._torch)
        random.setstate(self._random)
        for device, state in zip(self._devices, self._of_devices, strict=True):
            accelerator.set_random_state(device, state)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_bit_generator(self._numpy)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """A context in which `random`, NumPy and torch on the CPU draw from `seed`; then, they go on as before."""
    before = _host_states()
    try:
        seed_host(seed)
        yield
    finally:
        _set_host_states(before)


@contextmanager
def drawing_from(seed: int, devices: Sequence[torch.device]) -> Iterator[None]:
    """As `seeded`, on `devices` too; quickly, but that NumPy drops the second of two normal numbers drawn together."""
    before, others = (torch.get_rng_state(), random.getstate()), [each for each in devices if each.type != "cpu"]
    of_devices = [accelerator.random_state(each) for each in others]
    numpy_random = numpy_generator()
    of_numpy = numpy_random and numpy_random.get_bit_generator()
    try:
        if numpy_random:
            numpy_random.set_bit_generator(_spare_generator())
        seed_host(seed)
        for each in others:
            accelerator.set_random_state(each, torch.Generator(each).manual_seed(seed).get_state())
        yield
    finally:
        torch.set_rng_state(before[0])
        random.setstate(before[1])
        if numpy_random:
            numpy_random.set_bit_generator(of_numpy)
        for each, state in zip(others, of_devices, strict=True):
            accelerator.set_random_state(each, state)


@functools.cache
def _spare_generator() -> Any:
    return sys.modules["numpy"].random.MT19937(0)


def seed_host(seed: int) -> None:
    """Let `random`, NumPy and torch on the CPU draw from `seed`."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if numpy_random := numpy_generator():
        numpy_random.seed(seed & 0xFFFFFFFF)


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
