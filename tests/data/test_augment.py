"""Tests of `runner.data.augment`: torchvision's policies and random erasing, seeded by (seed, epoch, sample)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from helpers.compose import TINY_CPU, build_composed_run
from torchvision.transforms import v2

from runner.data.augment import NO_AUGMENT, POLICIES, Augment, borrowed_generator
from runner.seeds import sample_seeds

CPU = torch.device("cpu")
IMAGES = torch.randint(256, (6, 3, 16, 16), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


def workload(*overrides: str) -> Any:
    built_workload = build_composed_run("model=tiny", "device=cpu", "device.threads=1", *overrides).workload
    built_workload.prepare()
    return built_workload


def transformed(augment: Augment, seeds: Iterable[int], images: torch.Tensor = IMAGES) -> torch.Tensor:
    results = []
    with borrowed_generator() as generator:
        for image, seed in zip(images, seeds, strict=True):
            generator.manual_seed(seed)
            results.append(augment(image))
    return torch.stack(results)


@pytest.mark.parametrize(
    ("policy", "cls"), [("randaugment", v2.RandAugment), ("trivialaugment", v2.TrivialAugmentWide)]
)
def test_policies_are_bitwise_those_of_torchvision(policy: str, cls: Any) -> None:
    seeds = [3, 1 << 40, 5, 3, 9, 11]
    got = transformed(Augment(policy), seeds)
    for image, seed, changed in zip(IMAGES, seeds, got, strict=True):
        torch.manual_seed(seed)
        assert changed.equal(cls()(image))
    assert (got.dtype, got.shape) == (torch.uint8, IMAGES.shape)
    assert not got.equal(IMAGES)


def test_erased_rectangles_have_the_mean_color() -> None:
    got = transformed(Augment(erase=1.0, mean=(0.2, 0.4, 0.6)), range(6))
    for image, erased in zip(IMAGES, got, strict=True):
        changed = (image != erased).any(0)
        assert changed.any()
        colors = {tuple(color) for color in erased[:, changed].T.tolist()}
        assert colors == {(51, 102, 153)}


def test_seeds_differ_by_seed_epoch_and_sample() -> None:
    samples = torch.arange(100)
    seeds = [sample_seeds(seed, torch.full((100,), epoch), samples) for seed in (0, 1) for epoch in (0, 1)]
    assert len({value for each in seeds for value in each}) == 400
    assert sample_seeds(0, torch.zeros(1, dtype=torch.int64), torch.tensor([42])) == [seeds[0][42]]
    assert all(0 <= value < 1 << 63 for each in seeds for value in each)


def test_held_out_images_are_not_augmented() -> None:
    policies = ("data.auto_augment=randaugment", "data.random_erase=1")
    augmented, plain = workload(*TINY_CPU, *policies), workload(*TINY_CPU)
    got, wanted = (next(each.held_out.in_order(50, (0, 1), CPU)).inputs for each in (augmented, plain))
    assert got.equal(wanted)


def test_grayscale_images_keep_one_channel_and_the_default_does_nothing() -> None:
    for policy in POLICIES[1:]:
        assert transformed(Augment(policy, 0.5, (0.1,)), range(6), IMAGES[:, :1]).shape == (6, 1, 16, 16)
    assert not NO_AUGMENT
    assert Augment("none", 0.1)
