"""RandAugment, TrivialAugment and random erasing of single images; `memory.py` and `decode.py` crop and flip."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

POLICIES = ("none", "randaugment", "trivialaugment")


@dataclass(frozen=True)
class Augment:
    """Random transforms of training images. One seed per image determines the random numbers for that image.

    Args:
        policy: `randaugment`: two random operations of magnitude 9 of 30 (Cubuk et al., RandAugment, 2020);
            `trivialaugment`: one random operation of random magnitude (Müller and Hutter, TrivialAugment, 2021); or
            `none`. The operations are those of `RandAugment` and `TrivialAugmentWide` in `torchvision.transforms.v2`.
        erase: probability of erasing a random rectangle (Zhong et al., Random Erasing, 2020), after the policy.
        mean: mean of each channel, for pixels in [0, 1]; erased rectangles have this color.
    """

    policy: str = "none"
    erase: float = 0.0
    mean: tuple[float, ...] = ()

    def __bool__(self) -> bool:
        return self.policy != "none" or self.erase > 0

    def __call__(self, images: torch.Tensor, seeds: Sequence[int]) -> torch.Tensor:
        """Return the transformed images.

        Args:
            images: uint8 [n, channels, height, width].
            seeds: n seeds.
        """
        # The transforms use torch's default generator. Only its CPU part is seeded: the transforms draw nothing on
        # other devices, where `torch.manual_seed` would reset the random numbers of dropout.
        before = torch.get_rng_state()
        try:
            return torch.stack([self._transformed(image, seed) for image, seed in zip(images, seeds, strict=True)])
        finally:
            torch.set_rng_state(before)

    def _transformed(self, image: torch.Tensor, seed: int) -> torch.Tensor:
        torch.default_generator.manual_seed(seed)
        for transform in self._transforms:
            image = transform(image)
        return image

    @cached_property
    def _transforms(self) -> list[Any]:
        from torchvision.transforms import v2  # imported here: few runs need it

        policies = {"none": [], "randaugment": [v2.RandAugment], "trivialaugment": [v2.TrivialAugmentWide]}
        transforms: list[Any] = [make() for make in policies[self.policy]]
        if self.erase:
            color: Any = [round(255 * mean) for mean in self.mean]  # annotated as a float, but lists work
            transforms.append(v2.RandomErasing(self.erase, value=color))
        return transforms


NO_AUGMENT = Augment()
"""The augmentation that returns images unchanged."""
