"""Augmentation of single training images by torchvision, with random numbers that depend on (seed, epoch, sample)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

POLICIES = ("none", "randaugment", "trivialaugment")


@contextmanager
def borrowed_generator() -> Iterator[torch.Generator]:
    """A context with torch's default CPU generator, which transforms use, to be seeded anew; at the end, it goes on."""
    before = torch.get_rng_state()
    try:
        yield torch.default_generator
    finally:
        torch.set_rng_state(before)


@dataclass(frozen=True)
class Augment:
    """Random transforms of a training image after it was cropped and mirrored.

    Args:
        policy: `randaugment` (Cubuk et al., 2020), `trivialaugment` (Müller and Hutter, 2021) or `none`; those of
            `torchvision.transforms.v2`.
        erase: probability of erasing a random rectangle (Zhong et al., Random Erasing, 2020), after the policy.
        mean: mean of each channel, for pixels in [0, 1]; erased rectangles have this color.
    """

    policy: str = "none"
    erase: float = 0.0
    mean: tuple[float, ...] = ()

    def __bool__(self) -> bool:
        return self.policy != "none" or self.erase > 0

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        """Return the transformed image, uint8 [channels, height, width]; with random numbers of torch's generator."""
        for transform in self._transforms:
            image = transform(image)
        return image

    @cached_property
    def _transforms(self) -> list[Any]:
        from torchvision.transforms import v2  # few runs need it

        policies = {"none": [], "randaugment": [v2.RandAugment], "trivialaugment": [v2.TrivialAugmentWide]}
        transforms: list[Any] = [make() for make in policies[self.policy]]
        if self.erase:
            color: Any = [round(255 * mean) for mean in self.mean]  # annotated as a float, but lists work
            transforms.append(v2.RandomErasing(self.erase, value=color))
        return transforms


NO_AUGMENT = Augment()
