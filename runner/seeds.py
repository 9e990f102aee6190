"""One root seed, and what is drawn from it: streams of random numbers that depend on names, never on order.

Weights are drawn from the root alone, so that every rank builds the same model; exploration, dropout and environments
from (root, rank); augmentation from (root, epoch, sample).
"""

from __future__ import annotations

import hashlib

import torch

# The constants of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014), as
# two's complement: torch's int64 wraps around like C's.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


def derive(seed: int, *path: int | str) -> int:
    """A seed in [0, 2⁶³) for the stream called `path` under the root `seed`."""
    digest = hashlib.blake2b(repr((seed, *path)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def uniforms(seed: int, epochs: torch.Tensor, samples: torch.Tensor, count: int) -> torch.Tensor:
    """`count` uniform numbers in [0, 1) for each (epoch, sample): the same on every device, in every batch.

    A counter-based generator: the numbers are a hash of their place, so no state has to be kept, saved or shared.

    Args:
        epochs: int64 [n].
        samples: int64 [n].

    Returns:
        float32 [n, count], on the device of `samples`.
    """
    draws = torch.arange(count, device=samples.device)
    keys = _mix(_mix(_mix(samples + derive(seed, "augmentation")) + epochs)[:, None] + draws)
    return ((keys >> 40) & 0xFFFFFF).to(torch.float32) / (1 << 24)  # 24 bits: exact in float32


def random_bytes(seed: int, count: int, device: torch.device) -> torch.Tensor:
    """`count` uniform bytes, made on `device` by hashing their places: the same on every device.

    Returns:
        uint8 [count].
    """
    words = torch.empty(-(-count // 8), dtype=torch.int64, device=device)
    for start in range(0, len(words), _CHUNK):  # the hash's own temporaries stay small
        stop = min(start + _CHUNK, len(words))
        words[start:stop] = _mix(torch.arange(start, stop, device=device) + seed)
    return words.view(torch.uint8)[:count]


_CHUNK = 1 << 18


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = x + _GOLDEN
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    return x ^ _shift(x, 31)


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """`x` shifted right with zeros coming in: int64's own shift brings in the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
