"""Independent random number streams, each seeded by the root seed and the name of the stream.

Weights depend only on the root seed, so that all ranks build the same model. Exploration, dropout and environments
also depend on the index of the process; augmentation on the epoch and the sample.
"""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Sequence
from typing import Any

import torch

from runner.storage.value_checks import UnexpectedContentError
from runner.system import accelerator
from runner.system.generators import numpy_generator, seed_host

# The constants of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014) in
# two's complement, because torch's int64 arithmetic wraps around.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


_WORDS = 625  # of a Mersenne Twister: its key and the position in it


def derive(seed: int, *path: int | str) -> int:
    """Return a seed in [0, 2⁶³) for the stream named `path`, derived from the root `seed`."""
    digest = hashlib.blake2b(repr((seed, *path)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def uniforms(seed: int, epochs: torch.Tensor, samples: torch.Tensor, count: int) -> torch.Tensor:
    """Return `count` uniform random numbers in [0, 1) for each pair (epoch, sample), int64 [n]: float32 [n, count].

    They are the same on every device and in every batch: hashes of the epoch, the sample and the index of the number.
    """
    draws = torch.arange(count, device=samples.device)
    keys = _mix(_mix(_mix(samples + derive(seed, "augmentation")) + epochs)[:, None] + draws)
    return ((keys >> 40) & 0xFFFFFF).to(torch.float32) / (1 << 24)  # 24 bits: exact in float32


def sample_seeds(seed: int, epochs: torch.Tensor, samples: torch.Tensor) -> list[int]:
    """Return a seed in [0, 2⁶³) for each pair (epoch, sample), which depends on neither device nor batch."""
    numbers, of_epochs = (
        samples.cpu().numpy(),
        epochs.cpu().numpy(),
    )  # a call of NumPy takes less time than one of torch
    return (_mix(_mix(numbers + derive(seed, "transforms")) + of_epochs) & ((1 << 63) - 1)).tolist()


def random_states(devices: Sequence[torch.device]) -> dict[str, torch.Tensor]:
    """Return the states of the default generators of torch on the CPU and `devices`, of `random`, and of NumPy."""
    states = {"cpu": torch.get_rng_state()}
    states |= {name: accelerator.random_state(device) for name, device in _generator_names(devices).items()}
    _, words, normal = random.getstate()
    states["random"] = _packed(words, normal)
    if numpy_random := numpy_generator():
        _, key, position, has_normal, normal = numpy_random.get_state()
        states["numpy"] = _packed((*key.tolist(), position), normal if has_normal else None)
    return states


def drawn_since(before: dict[str, torch.Tensor], devices: Sequence[torch.device]) -> list[str]:
    """Return the names of the generators that have drawn since `random_states` returned `before`."""
    return [name for name, state in random_states(devices).items() if not state.equal(before[name])]


def set_random_states(state: dict[str, torch.Tensor], devices: Sequence[torch.device]) -> None:
    """Set the generators to `state`, of `random_states`; those that are not in it do not change."""
    torch.set_rng_state(state["cpu"])
    for name, device in _generator_names(devices).items():
        if name in state:
            accelerator.set_random_state(device, state[name])
    if "random" in state:
        random.setstate((random.getstate()[0], *_unpacked(state["random"])))
    if "numpy" in state and (numpy_random := numpy_generator()):
        (*key, position), normal = _unpacked(state["numpy"])
        numpy_random.set_state(("MT19937", key, position, int(normal is not None), normal or 0.0))


def seed_all(seed: int) -> None:
    """Seed the default generators of torch on all devices, of `random`, and of NumPy."""
    if accelerator.accelerator_type():  # else torch would keep each call, with its stack, for one found later: 2 ms
        torch.manual_seed(seed)
    seed_host(seed)


def _packed(words: Sequence[int], normal: float | None) -> torch.Tensor:
    """Return a Mersenne Twister's `words` and the normal number that it has left, if it has, as int64."""
    [bits] = struct.unpack("q", struct.pack("d", normal or 0.0))
    return torch.tensor([*words, int(normal is not None), bits], device="cpu")


def _unpacked(state: torch.Tensor) -> tuple[tuple[int, ...], float | None]:
    *words, has_normal, bits = state.tolist()
    if len(words) != _WORDS or not 0 <= words[-1] < _WORDS or not all(0 <= word < 1 << 32 for word in words):
        raise UnexpectedContentError("a random state: it is none of a Mersenne Twister")  # NumPy would read beyond it
    return tuple(words), struct.unpack("d", struct.pack("q", bits))[0] if has_normal else None


def _generator_names(devices: Sequence[torch.device]) -> dict[str, torch.device]:
    return {
        f"{device.type} {position}" if position else device.type: device
        for position, device in enumerate(devices)
        if device.type != "cpu"
    }


def random_bytes(seed: int, count: int, device: torch.device) -> torch.Tensor:
    """Return `count` uniform random bytes, uint8 [count], which depend only on `seed`, not on the device."""
    words = torch.empty(-(-count // 8), dtype=torch.int64, device=device)
    for start in range(0, len(words), _CHUNK):  # bounds the memory of the hash's temporaries
        stop = min(start + _CHUNK, len(words))
        words[start:stop] = _mix(torch.arange(start, stop, device=device) + seed)
    return words.view(torch.uint8)[:count]


_CHUNK = 1 << 18


def _mix(x: Any) -> Any:
    """Return hashes of `x`, a tensor or an array of int64, whose arithmetic wraps around."""
    x = x + _GOLDEN
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    return x ^ _shift(x, 31)


def _shift(x: Any, bits: int) -> Any:
    """Shift `x` right, filling with zero bits. (On int64, `>>` alone would fill with copies of the sign bit.)"""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
