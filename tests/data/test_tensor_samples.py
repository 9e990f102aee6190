"""Tests of `runner.data.memory`: order, augmentation and normalization against simple, slow reference code."""

from __future__ import annotations

import itertools

import pytest
import torch

from runner.batching import Plan, SampleOrder
from runner.data.memory import TensorSamples
from runner.seeds import uniforms

CPU = torch.device("cpu")
MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)


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


def test_floats_and_bytes_give_the_same_batches():
    bytes_ = pool(crop=2, flip=True)
    floats = torch.stack([normalized(image) for image in bytes_.inputs])
    other = TensorSamples(floats, bytes_.targets, list("abcd"), MEAN, STD, crop=2, flip=True)
    for (a, _), (b, _) in zip(take(bytes_, Plan(8), 0, 5), take(other, Plan(8), 0, 5), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-6)


@pytest.mark.parametrize(("accumulation", "world_size"), [(3, 1), (1, 4), (2, 3)])
def test_batches_do_not_depend_on_how_they_are_divided(accumulation, world_size):
    samples = pool(crop=2, flip=True)
    whole = take(samples, Plan(12), 0, 4)
    for step, (inputs, targets) in enumerate(whole):
        parts = [take(samples, Plan(12, accumulation, (r, world_size)), step, accumulation) for r in range(world_size)]
        assert torch.equal(torch.cat([part[0] for rank in parts for part in rank]), inputs)
        assert torch.equal(torch.cat([part[1] for rank in parts for part in rank]), targets)


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_shards_in_order_have_each_sample_once(count):
    samples = pool(crop=2, flip=True)
    batches = [list(samples.in_order(4, (index, count), CPU)) for index in range(count)]
    numbered = [pair for index in range(count) for pair in samples.in_order_with_indices(4, (index, count), CPU)]
    assert torch.cat([indices for indices, _ in numbered]).tolist() == list(range(20))
    assert all(torch.equal(samples.targets[indices], batch.targets) for indices, batch in numbered)
    inputs = torch.cat([batch.inputs for shard in batches for batch in shard])
    expected = torch.stack([normalized(image) for image in samples.inputs])
    torch.testing.assert_close(inputs, expected, rtol=0, atol=2e-6)
    targets = [target for shard in batches for batch in shard for target in batch.targets.tolist()]
    assert targets == samples.targets.tolist()
    assert max(len(batch.targets) for shard in batches for batch in shard) <= 4


def test_display_images_returns_the_images_before_normalization():
    samples = pool()
    floats = torch.stack([normalized(image) for image in samples.inputs])
    other = TensorSamples(floats, samples.targets, list("abcd"), MEAN, STD)
    assert torch.equal(samples.display_images([5, 0]), samples.inputs[[5, 0]])
    assert torch.equal(other.display_images([5, 0]), samples.inputs[[5, 0]])
