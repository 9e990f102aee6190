"""Tests of samples in memory and their augmentation: digits, synthetic images, and batches against slow references."""

import itertools
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


@pytest.mark.parametrize("size", [4, 60, 200])
@pytest.mark.parametrize("plan", [Plan(3), Plan(12, 2, (1, 2))], ids=["all samples", "a rank's micro-batches"])
def test_small_batches_are_prepared_together_and_each_may_be_changed_in_place(size, plan):
    """Of 4² and 60² pixels, several are; of 200², none."""
    samples, parts = pool(height=size, width=size, crop=2, flip=True), plan.accumulation
    wanted = [batch for step in range(9) for batch in take(samples, plan, step, parts)]
    for (inputs, targets), (wanted_inputs, wanted_targets) in zip(
        take(samples, plan, 0, 9 * parts), wanted, strict=True
    ):
        assert torch.equal(inputs, wanted_inputs)
        assert torch.equal(targets, wanted_targets)
        assert inputs.untyped_storage().nbytes() == 4 * inputs.numel()
        inputs.zero_()
        targets.zero_()


@pytest.mark.parametrize(("count", "prepared"), [(1, 1), (4, 7), (100, 127)])
def test_a_short_run_prepares_few_batches_that_it_does_not_need(count, prepared):
    asked = []
    micros = (asked.append(micro) or micro for micro in Plan(3).stream(0))
    assert len([*itertools.islice(pool(height=4, width=4).batches(micros, 0, CPU), count)]) == count
    assert len(asked) == prepared, "1, 2, 4 … batches at once"


@pytest.mark.parametrize(("accumulation", "world_size"), [(3, 1), (2, 3)])
def test_batches_do_not_depend_on_how_they_are_divided(accumulation, world_size):
    samples = pool(height=16, width=16, crop=2, flip=True, augment=AUGMENT)
    plans = [Plan(12, accumulation, (rank, world_size)) for rank in range(world_size)]
    for step, (inputs, targets) in enumerate(take(samples, Plan(12), 0, 4)):
        parts = [part for plan in plans for part in take(samples, plan, step, accumulation)]
        assert torch.equal(torch.cat([part[0] for part in parts]), inputs)
        assert torch.equal(torch.cat([part[1] for part in parts]), targets)
    samples.augment = None
    assert not torch.equal(take(samples, Plan(12), 3, 1)[0][0], inputs)


def test_shards_in_order_have_each_sample_once_with_its_index():
    samples = pool(crop=2, flip=True)
    numbered = [pair for index in range(3) for pair in samples.in_order_with_indices(4, (index, 3), CPU)]
    assert torch.cat([indices for indices, _ in numbered]).tolist() == list(range(20))
    assert torch.equal(torch.cat([batch.targets for _, batch in numbered]), samples.targets)
    expected = torch.stack([normalized(image) for image in samples.inputs])
    torch.testing.assert_close(torch.cat([batch.inputs for _, batch in numbered]), expected, rtol=0, atol=2e-6)
    assert max(len(indices) for indices, _ in numbered) <= 4


def digits(**options) -> Any:
    return Digits(**options).load()


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
    for size, samples in ((8, again), (28, digits(size=28, auto_augment="randaugment", random_erase=1))):
        inputs = torch.cat([part.inputs for part in samples])
        assert samples[0].shape == (1, size, size) == tuple(inputs.shape[1:])
        assert inputs.mean().abs() < 1e-5
        assert (inputs.std() - 1).abs() < 1e-5
        assert not samples[1].augment


def test_pixels_are_hashes_of_their_positions_made_at_their_first_use_without_global_random_numbers():
    before, parts = torch.get_rng_state(), Synthetic(num_samples=300, holdout=60, size=16, num_classes=5).load()
    both: Any = zip(("train", "holdout"), parts, strict=True)
    for part, samples in both:
        assert samples.inputs.is_meta
        (batch,) = samples.in_order(300, (0, 1), CPU)
        pictures = samples.display_images([*range(len(samples))])
        expected = random_bytes(derive(0, "synthetic", part), len(samples) * 3 * 16 * 16, CPU)
        assert torch.equal(pictures.flatten(), expected)
        assert torch.equal(((batch.inputs * samples.std[0] + samples.mean[0]) * 255).round().to(torch.uint8), pictures)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.gpu
def test_a_gpu_generates_the_same_images():
    (here, _), (there, _) = (Synthetic(num_samples=20, size=8, num_classes=3).load() for _ in range(2))
    (one,) = here.in_order(20, (0, 1), CPU)
    (other,) = there.in_order(20, (0, 1), torch.device("cuda", 0))
    assert other.inputs.device == other.targets.device == torch.device("cuda", 0)
    assert torch.equal(here.inputs, there.inputs.cpu())  # the bytes
    torch.testing.assert_close(one.inputs, other.inputs.cpu())  # a GPU multiplies by 1 / 255 where a CPU divides
    assert torch.equal(one.targets, other.targets.cpu())


def test_images_of_more_than_4_gib_are_refused_before_they_are_generated():
    with pytest.raises(ConfigError, match=r"1000128 images of this size take 45\.8 GiB"):
        Synthetic(num_samples=1_000_000)


IMAGES = torch.randint(256, (6, 3, 16, 16), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("policy", "cls"), [("randaugment", v2.RandAugment), ("trivialaugment", v2.TrivialAugmentWide)]
)
def test_policies_are_bitwise_those_of_torchvision(policy, cls):
    transform: Any = Digits(auto_augment=policy, random_erase=0.0).transform((0.1,))
    for channels, (seed, image) in itertools.product((1, 3), enumerate(IMAGES)):
        torch.manual_seed(seed)
        got = transform(image[:channels])
        torch.manual_seed(seed)
        assert got.equal(cls()(image[:channels]))


def test_erased_rectangles_have_the_mean_color():
    transform: Any = Digits(random_erase=1.0).transform((0.2, 0.4, 0.6))
    for image in IMAGES:
        erased = transform(image)
        changed = (image != erased).any(0)
        assert changed.any()
        colors = {tuple(color) for color in erased[:, changed].T.tolist()}
        assert colors == {(51, 102, 153)}
