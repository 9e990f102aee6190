"""Tests that random numbers depend on the seed and the name of their stream, not on the order of calls."""

import hashlib
import random

import numpy as np
import pytest
import torch

from runner import seeds
from runner.seeds import derive, random_bytes, random_states, sample_seeds, seed_all, set_random_states, uniforms
from runner.storage.value_checks import UnexpectedContentError
from runner.system import accelerator

WORD = (1 << 64) - 1


def split_mix(x: int) -> int:
    """Return the SplitMix64 hash of `x`, as its authors define it, with Python's integers."""
    x = (x + 0x9E3779B97F4A7C15) & WORD
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & WORD
    return x ^ (x >> 31)


def reference(seed: int, epoch: int, sample: int, count: int) -> list[float]:
    key = split_mix((split_mix((sample + derive(seed, "augmentation")) & WORD) + epoch) & WORD)
    return [(split_mix((key + draw) & WORD) >> 40) / 2**24 for draw in range(count)]


def test_a_derived_seed_is_the_hash_of_its_arguments():
    digest = hashlib.blake2b(b"(7, 'order', 3)", digest_size=8).digest()
    assert derive(7, "order", 3) == int.from_bytes(digest, "big") // 2
    assert torch.Generator().manual_seed(derive(7, "order", 3)).initial_seed() == derive(7, "order", 3)


@pytest.mark.parametrize("seed", [0, 1, 2**31, -5])
def test_uniforms_are_those_of_the_reference(seed):
    epochs, samples = torch.tensor([0, 0, 1, 7, 10**6]), torch.tensor([0, 1, 0, 59_999, 2**40])
    drawn = uniforms(seed, epochs, samples, 5)
    expected = [reference(seed, int(e), int(s), 5) for e, s in zip(epochs, samples, strict=True)]
    assert drawn.dtype == torch.float32
    assert torch.equal(drawn, torch.tensor(expected, dtype=torch.float32))


@pytest.mark.parametrize("count", [0, 1, 8, 83, 1000])
def test_random_bytes_are_those_of_the_reference_whatever_the_chunk(count, monkeypatch):
    seed = derive(3, "x")
    words = b"".join(split_mix((place + seed) & WORD).to_bytes(8, "little") for place in range(125))
    monkeypatch.setattr(seeds, "_CHUNK", 7)
    drawn = random_bytes(seed, count, torch.device("cpu"))
    assert drawn.dtype == torch.uint8
    assert bytes(drawn.tolist()) == words[:count]


def test_the_generators_of_all_devices_of_a_process_are_saved(monkeypatch):
    generators = [torch.Generator().manual_seed(seed) for seed in range(3)]  # stand for those of three GPUs
    monkeypatch.setattr(accelerator, "random_state", lambda device: generators[device.index].get_state())
    monkeypatch.setattr(
        accelerator, "set_random_state", lambda device, state: generators[device.index].set_state(state)
    )
    first, second, third = (torch.device("cuda", index) for index in range(3))
    saved = random_states([third, first])
    wanted = [torch.rand(3, generator=generator) for generator in generators]
    set_random_states(saved, [second, first])  # a resume on other devices
    assert torch.equal(torch.rand(3, generator=generators[1]), wanted[2])
    assert torch.equal(torch.rand(3, generator=generators[0]), wanted[0])
    assert saved.keys() == {"cpu", "cuda", "cuda 1", "random", "numpy"}


def test_sample_seeds_differ_by_seed_epoch_and_sample():
    samples = torch.arange(100)
    seeds = [sample_seeds(seed, torch.full((100,), epoch), samples) for seed in (0, 1) for epoch in (0, 1)]
    assert len({value for each in seeds for value in each}) == 400
    assert sample_seeds(0, torch.zeros(1, dtype=torch.int64), torch.tensor([42])) == [seeds[0][42]]
    assert all(0 <= value < 1 << 63 for each in seeds for value in each)


def draw() -> list[float]:
    """Numbers of all generators; of normal ones, the generators of Python and NumPy keep every second for later."""
    return [random.gauss(0, 1), random.random(), np.random.standard_normal(), np.random.rand(), torch.rand(()).item()]


@pytest.mark.parametrize("count", [0, 1, 400])  # after 624 numbers, a Mersenne Twister makes new ones
def test_random_and_numpy_are_seeded_and_restored_as_torch_is(count):
    seed_all(derive(1, "weights"))
    first = [draw() for _ in range(count)]
    saved = random_states(())
    wanted = [draw() for _ in range(3)]
    random.seed(5)
    np.random.seed(5)
    set_random_states(saved, ())
    assert [draw() for _ in range(3)] == wanted
    seed_all(derive(1, "weights"))
    assert [draw() for _ in range(count)] == first
    seed_all(derive(2, "weights"))
    assert draw() not in (first + wanted)


@pytest.mark.parametrize(("place", "value"), [(624, 625), (624, -1), (0, 1 << 32), (3, -1)])
@pytest.mark.parametrize("name", ["random", "numpy"])
def test_a_state_with_which_a_generator_would_read_beyond_its_memory_is_refused(name, place, value):
    saved = random_states(())
    saved[name][place] = value
    with pytest.raises(UnexpectedContentError, match="random state"):
        set_random_states(saved, ())
