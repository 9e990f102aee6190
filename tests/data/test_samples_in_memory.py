"""Tests of samples in memory and their augmentation: digits, synthetic images, and batches against slow references."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torchvision.transforms import v2

from runner.batching import Plan, SampleOrder
from runner.config.errors import ConfigError
from runner.data.built_in import Digits, Synthetic
from runner.data.memory import TensorSamples
from runner.seeds import derive, random_bytes, uniforms

CPU = torch.device("cpu")
MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)


AUGMENT = Digits(auto_augment="trivialaugment", random_erase=0.5).transform(MEAN)


def pool(count: int = 20, height: int = 7, width: int = 5, **options) -> TensorSamples:
    images = torch.randint(256, (count, 3, height, width), dtype=torch.uint8)
    return TensorSamples(images, torch.arange(count) % 4, list("abcd"), MEAN, STD, **options)


def normalized(image: torch.Tensor) -> torch.Tensor:
    """Normalize an image pixel by pixel, in double precision."""
    result = torch.empty(image.shape, dtype=torch.float64)
    for channel, row, column in itertools.product(*map(range, image.shape)):
        result[channel, row, column] = (int(image[channel, row, column]) / 255 - MEAN[channel]) / STD[channel]
    return result.float()


def augmented(image: torch.Tensor, draws: torch.Tensor, crop: int, flip: bool) -> torch.Tensor:
    """Pad an image with black, crop it at a random offset, and mirror it."""
    channels, height, width = image.shape
    canvas = torch.zeros(channels, height + 2 * crop, width + 2 * crop, dtype=torch.uint8)
    canvas[:, crop : crop + height, crop : crop + width] = image
    top, left = (int(draw * (2 * crop + 1)) for draw in draws[:2].tolist())
    part = canvas[:, top : top + height, left : left + width]
    return part.flip(2) if flip and draws[2] < 0.5 else part


def take(samples: TensorSamples, plan: Plan, after_step: int, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(itertools.islice(samples.batches(plan.stream(after_step), plan.seed, CPU), count))


@pytest.mark.parametrize(("crop", "flip"), [(0, False), (0, True), (2, False), (2, True), (6, True)])
def test_every_sample_of_a_batch_equals_that_of_the_reference_code(crop, flip):
    samples = pool(crop=crop, flip=flip)
    order = SampleOrder(20, seed=3)
    micros = list(itertools.islice(Plan(12, seed=3).stream(0), 5))  # three epochs
    for micro, batch in zip(micros, samples.batches(micros, 3, CPU), strict=True):
        indices, epochs = order.indices(micro.start, micro.stop), order.epochs(micro.start, micro.stop)
        draws = uniforms(3, epochs, indices, 3)
        assert batch.targets.tolist() == [int(i) % 4 for i in indices]
        for row, index in enumerate(indices):
            expected = normalized(augmented(samples.inputs[index], draws[row], crop, flip))
            torch.testing.assert_close(batch.inputs[row], expected, rtol=0, atol=2e-6)


def test_floats_and_bytes_give_the_same_batches_and_pictures():
    bytes_ = pool(crop=2, flip=True)
    floats = torch.stack([normalized(image) for image in bytes_.inputs])
    other = TensorSamples(floats, bytes_.targets, list("abcd"), MEAN, STD, crop=2, flip=True)
    for samples in (bytes_, other):
        assert torch.equal(samples.display_images([5, 0]), bytes_.inputs[[5, 0]])
    for (a, _), (b, _) in zip(take(bytes_, Plan(8), 0, 5), take(other, Plan(8), 0, 5), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-6)


@pytest.mark.parametrize(("accumulation", "world_size"), [(3, 1), (1, 4), (2, 3)])
def test_batches_do_not_depend_on_how_they_are_divided(accumulation, world_size):
    samples = pool(height=16, width=16, crop=2, flip=True, augment=AUGMENT)
    for step, (inputs, targets) in enumerate(take(samples, Plan(12), 0, 4)):
        parts = [take(samples, Plan(12, accumulation, (r, world_size)), step, accumulation) for r in range(world_size)]
        assert torch.equal(torch.cat([part[0] for rank in parts for part in rank]), inputs)
        assert torch.equal(torch.cat([part[1] for rank in parts for part in rank]), targets)
        plain = pool(height=16, width=16, crop=2, flip=True)
        plain.inputs = samples.inputs
        assert not torch.equal(take(plain, Plan(12), step, 1)[0][0], inputs)


@pytest.mark.parametrize("count", [1, 3])
def test_shards_in_order_have_each_sample_once_with_its_index(count):
    samples = pool(crop=2, flip=True)
    numbered = [pair for index in range(count) for pair in samples.in_order_with_indices(4, (index, count), CPU)]
    assert torch.cat([indices for indices, _ in numbered]).tolist() == list(range(20))
    assert torch.equal(torch.cat([batch.targets for _, batch in numbered]), samples.targets)
    expected = torch.stack([normalized(image) for image in samples.inputs])
    torch.testing.assert_close(torch.cat([batch.inputs for _, batch in numbered]), expected, rtol=0, atol=2e-6)
    assert max(len(indices) for indices, _ in numbered) <= 4


# ---------------------------------------------------------------------------------------------------------------------
# Digits


def digits(**options) -> tuple[TensorSamples, TensorSamples]:
    train, held_out = Digits(**options).load()
    assert isinstance(train, TensorSamples)
    assert isinstance(held_out, TensorSamples)
    return train, held_out


def scikit_images(samples: TensorSamples) -> list[tuple[int, ...]]:
    """Return each sample in the format of scikit-learn: 64 pixels from 0 to 16, and the class."""
    levels = ((samples.inputs * samples.std[0] + samples.mean[0]) * 16).round().long().flatten(1)
    return [tuple(row) for row in torch.cat((levels, samples.targets[:, None]), 1).tolist()]


def test_they_are_scikit_learns_and_the_split_is_the_same_in_every_run():
    bunch = load_digits()
    everything = torch.cat((torch.from_numpy(bunch.data), torch.from_numpy(bunch.target)[:, None]), 1).long()
    (train, held_out), again = digits(size=8), digits(size=8)
    assert sorted(scikit_images(train) + scikit_images(held_out)) == sorted(map(tuple, everything.tolist()))
    assert (len(train), len(held_out)) == (1438, 359)
    assert torch.equal(held_out.inputs, again[1].inputs)
    assert set(scikit_images(digits(size=8, holdout=0.1)[1])) < set(scikit_images(held_out))
    assert len(digits(size=8, holdout=0.0001)[1]) == 1  # at least one, because an evaluation needs a sample


@pytest.mark.parametrize("size", [8, 28])
def test_inputs_are_normalized_and_have_the_requested_size(size):
    train, held_out = digits(size=size)
    inputs = torch.cat((train.inputs, held_out.inputs))
    assert train.shape == (1, size, size) == tuple(inputs.shape[1:])
    assert inputs.mean().abs() < 1e-5
    assert (inputs.std() - 1).abs() < 1e-5


# ---------------------------------------------------------------------------------------------------------------------
# Synthetic images


def synthetic(**options) -> tuple[TensorSamples, TensorSamples]:
    """Return training and held-out samples after generating their images."""
    train, held_out = Synthetic(**({"num_samples": 300, "holdout": 60, "size": 16, "num_classes": 5} | options)).load()
    for samples in (train, held_out):
        next(samples.in_order(1, (0, 1), CPU))
    assert isinstance(train, TensorSamples)
    assert isinstance(held_out, TensorSamples)
    return train, held_out


@pytest.mark.parametrize("learnable", [False, True])
def test_images_are_generated_on_the_device_of_their_first_use(learnable):
    train, _ = Synthetic(num_samples=20, size=8, num_classes=3, learnable=learnable).load()
    assert isinstance(train, TensorSamples)
    assert train.inputs.is_meta
    pictures = train.display_images([3, 0])
    (batch,) = train.in_order(20, (0, 1), CPU)
    scaled = batch.inputs[[3, 0]] * train.std[0] + train.mean[0]
    assert torch.equal((scaled * 255).round().to(torch.uint8), pictures)


def test_pixels_are_hashes_of_their_positions_and_use_no_global_random_numbers():
    before = torch.get_rng_state()
    train, held_out = synthetic()
    assert torch.equal(torch.get_rng_state(), before)
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
    assert torch.equal(here.inputs, there.inputs.cpu())  # the bytes
    torch.testing.assert_close(one.inputs, other.inputs.cpu())  # a GPU multiplies by 1 / 255 where a CPU divides
    assert torch.equal(one.targets, other.targets.cpu())


@pytest.mark.parametrize("learnable", [False, True])
def test_the_nearest_class_mean_predicts_the_class_only_if_learnable(learnable):
    train, held_out = synthetic(learnable=learnable)
    means = torch.stack([train.inputs[train.targets == c].float().mean(0).flatten() for c in range(5)])
    nearest = torch.cdist(held_out.inputs.float().flatten(1), means).argmin(1)
    accuracy = (nearest == held_out.targets).float().mean()
    assert accuracy > 0.95 if learnable else accuracy < 0.45


def test_images_of_more_than_4_gib_are_refused_before_they_are_generated():
    with pytest.raises(ConfigError, match=r"1000128 images of this size take 45\.8 GiB"):
        Synthetic(num_samples=1_000_000)


# ---------------------------------------------------------------------------------------------------------------------
# Transforms of torchvision


IMAGES = torch.randint(256, (6, 3, 16, 16), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


def transformed(
    policy: str, erase: float, mean: tuple[float, ...], seeds: Iterable[int], images: torch.Tensor = IMAGES
) -> torch.Tensor:
    results = []
    for image, seed in zip(images, seeds, strict=True):
        torch.manual_seed(seed)
        transform = Digits(auto_augment=policy, random_erase=erase).transform(mean)
        assert transform is not None
        results.append(transform(image))
    return torch.stack(results)


@pytest.mark.parametrize(
    ("policy", "cls"), [("randaugment", v2.RandAugment), ("trivialaugment", v2.TrivialAugmentWide)]
)
def test_policies_are_bitwise_those_of_torchvision(policy: str, cls: Any) -> None:
    seeds = [3, 1 << 40, 5, 3, 9, 11]
    got = transformed(policy, 0, (), seeds)
    for image, seed, changed in zip(IMAGES, seeds, got, strict=True):
        torch.manual_seed(seed)
        assert changed.equal(cls()(image))
    assert (got.dtype, got.shape) == (torch.uint8, IMAGES.shape)
    assert not got.equal(IMAGES)
    assert transformed(policy, 0.5, (0.1,), seeds, IMAGES[:, :1]).shape == (6, 1, 16, 16)


def test_erased_rectangles_have_the_mean_color() -> None:
    got = transformed("none", 1.0, (0.2, 0.4, 0.6), range(6))
    for image, erased in zip(IMAGES, got, strict=True):
        changed = (image != erased).any(0)
        assert changed.any()
        colors = {tuple(color) for color in erased[:, changed].T.tolist()}
        assert colors == {(51, 102, 153)}


def test_held_out_images_are_not_augmented() -> None:
    assert torch.equal(digits(auto_augment="randaugment", random_erase=1)[1].inputs, digits()[1].inputs)
    assert not digits(auto_augment="randaugment", random_erase=1)[1].augment
