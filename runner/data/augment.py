"""Augmentation of training images: transforms of torchvision, and mixing of samples."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from runner.batching import MicroBatch
from runner.config.limits import Fraction
from runner.data.base import Batch, Data, LabeledSamples, Sampler
from runner.seeds import derive

Transform = Callable[["torch.Tensor"], "torch.Tensor"]
"""A random transform of an image, uint8 [channels, height, width], with random numbers of torch's CPU generator."""


@dataclass
class Augmented(Data):
    """Options of images that are transformed for training, after they were cropped and mirrored.

    `auto_augment` is `randaugment` (Cubuk et al., 2020), `trivialaugment` (Müller and Hutter, 2021) or `none`;
    `random_erase` is the probability of erasing a random rectangle after that (Zhong et al., Random Erasing, 2020).
    """

    auto_augment: Literal["none", "randaugment", "trivialaugment"] = field(default="none", kw_only=True)
    random_erase: Fraction = field(default=0.0, kw_only=True)
    sampler: Sampler = field(default="uniform", kw_only=True)

    def transform(self, mean: Sequence[float]) -> Transform | None:
        """Return the transform, torchvision's, if any; `mean`, of each channel in [0, 1], is the color of erasing."""
        if self.auto_augment == "none" and not self.random_erase:
            return None
        from torchvision.transforms import v2  # few runs need it

        policies = {"none": v2.Identity, "randaugment": v2.RandAugment, "trivialaugment": v2.TrivialAugmentWide}
        color: Any = [round(255 * value) for value in mean]  # annotated as a float, but lists work
        return v2.Compose([policies[self.auto_augment](), v2.RandomErasing(self.random_erase, value=color)])


@dataclass(frozen=True)
class Mixing:
    """Mixes each sample of a global batch with the previous sample, and the first sample with the last.

    As in `torchvision.transforms.v2`, all samples of a global batch are mixed in one random proportion, by mixup or by
    CutMix. The random numbers depend on the seed and the index of the batch, and each micro-batch also loads the sample
    before its first, so that the result does not depend on how the batch is divided.

    `mixup` is the α of mixup (Zhang et al., mixup, 2018): two images are blended in a proportion drawn from Beta(α, α).
    `cutmix` is the α of CutMix (Yun et al., CutMix, 2019): a rectangle is replaced by that of the other image.
    """

    mixup: float = 0.0
    cutmix: float = 0.0

    def __bool__(self) -> bool:
        return self.mixup > 0 or self.cutmix > 0

    def batches(
        self, samples: LabeledSamples, micros: Iterable[MicroBatch], batch_size: int, seed: int, device: torch.device
    ) -> Iterator[Batch]:
        """Yield mixed parts of global batches of `batch_size`; targets are probabilities, float32 [n, num_classes]."""
        asked: deque[MicroBatch] = deque()

        def with_partners() -> Iterator[MicroBatch]:
            for micro in micros:
                asked.append(micro)
                first = micro.start // batch_size * batch_size
                before = micro.start - 1 if micro.start > first else first + batch_size - 1
                yield micro._replace(start=before, stop=before + 1)
                yield micro

        stream = iter(samples.batches(with_partners(), seed, device))
        for before in stream:
            batch, number = next(stream), asked.popleft().start // batch_size
            inputs = torch.cat([before.inputs, batch.inputs[:-1]])
            targets = torch.cat([before.targets, batch.targets[:-1]])
            yield self._mixed(batch, Batch(inputs, targets), samples.num_classes, derive(seed, "mixing", number))

    def _mixed(self, batch: Batch, partners: Batch, num_classes: int, seed: int) -> Batch:
        draws = random.Random(seed)
        blends = draws.random() < 0.5 if self.mixup and self.cutmix else self.mixup > 0
        alpha = self.mixup if blends else self.cutmix
        share = draws.betavariate(alpha, alpha)
        if blends:
            inputs = batch.inputs * share + partners.inputs * (1 - share)
        else:
            # A rectangle of the aspect ratio of the image, with its center anywhere; what lies outside is cut off.
            height, width = batch.inputs.shape[-2:]
            half = 0.5 * math.sqrt(1 - share)
            y, x = draws.randrange(height), draws.randrange(width)
            rows = slice(max(0, y - int(half * height)), min(height, y + int(half * height)))
            columns = slice(max(0, x - int(half * width)), min(width, x + int(half * width)))
            inputs = batch.inputs.clone()
            inputs[..., rows, columns] = partners.inputs[..., rows, columns]
            share = 1 - (rows.stop - rows.start) * (columns.stop - columns.start) / (height * width)
        here, there = (torch.nn.functional.one_hot(each.targets, num_classes).float() for each in (batch, partners))
        return Batch(inputs, here * share + there * (1 - share))
