"""Tests of `data=synthetic`, random images for benchmarks."""

from __future__ import annotations

import pytest
import torch

from runner.config.errors import ConfigError
from runner.data.memory import TensorSamples
from runner.data.synthetic import Synthetic
from runner.seeds import derive, random_bytes

CPU = torch.device("cpu")


def loaded(**options) -> tuple[TensorSamples, TensorSamples]:
    """Return training and held-out samples after generating their images."""
    train, held_out = Synthetic(**({"num_samples": 300, "holdout": 60, "size": 16, "num_classes": 5} | options)).load()
    for samples in (train, held_out):
        next(samples.in_order(1, (0, 1), CPU))
    assert isinstance(train, TensorSamples)
    assert isinstance(held_out, TensorSamples)
    return train, held_out


def test_images_are_the_same_in_every_run_and_use_no_global_random_numbers():
    before = torch.get_rng_state()
    (a, held_a), (b, held_b) = loaded(), loaded()
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(a.inputs, b.inputs)
    assert torch.equal(held_a.targets, held_b.targets)
    assert not torch.equal(a.inputs[:60], held_a.inputs)


@pytest.mark.parametrize("learnable", [False, True])
def test_images_are_generated_on_the_device_of_their_first_use(learnable):
    train, _ = Synthetic(num_samples=20, size=8, num_classes=3, learnable=learnable).load()
    assert isinstance(train, TensorSamples)
    assert train.inputs.is_meta
    pictures = train.display_images([3, 0])
    (batch,) = train.in_order(20, (0, 1), CPU)
    scaled = batch.inputs[[3, 0]] * train.std[0] + train.mean[0]
    assert torch.equal((scaled * 255).round().to(torch.uint8), pictures)
    again, _ = Synthetic(num_samples=20, size=8, num_classes=3, learnable=learnable).load()
    (other,) = again.in_order(20, (0, 1), torch.device("meta"))  # works on meta, too, a device without data
    assert other.inputs.is_meta


def test_pixels_are_hashes_of_their_positions():
    train, held_out = loaded()
    for part, samples in (("train", train), ("holdout", held_out)):
        expected = random_bytes(derive(0, "synthetic", part), len(samples) * 3 * 16 * 16, CPU)
        assert torch.equal(samples.inputs.flatten(), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("learnable", [False, True])
def test_a_gpu_generates_the_same_images(learnable):
    (here, _), (there, _) = (
        Synthetic(num_samples=20, size=8, num_classes=3, learnable=learnable).load() for _ in range(2)
    )
    (one,) = here.in_order(20, (0, 1), CPU)
    (other,) = there.in_order(20, (0, 1), torch.device("cuda", 0))
    assert other.inputs.device == other.targets.device == torch.device("cuda", 0)
    assert torch.equal(one.inputs, other.inputs.cpu())
    assert torch.equal(one.targets, other.targets.cpu())


@pytest.mark.parametrize(("learnable", "least", "most"), [(True, 0.95, 1.0), (False, 0.0, 0.45)])
def test_the_nearest_class_mean_predicts_the_class_only_if_learnable(learnable, least, most):
    train, held_out = loaded(learnable=learnable)
    means = torch.stack([train.inputs[train.targets == c].float().mean(0).flatten() for c in range(5)])
    nearest = torch.cdist(held_out.inputs.float().flatten(1), means).argmin(1)
    accuracy = (nearest == held_out.targets).float().mean()
    assert least <= accuracy <= most


def test_images_of_more_than_4_gib_are_refused_before_they_are_generated():
    with pytest.raises(ConfigError, match=r"1000128 images of this size take 45\.8 GiB"):
        Synthetic(num_samples=1_000_000)
