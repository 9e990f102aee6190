"""Random images with labels, for benchmarks; their size and the number of classes are options."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from runner.config.errors import check, check_range
from runner.data.base import Data, Samples
from runner.data.memory import TensorSamples
from runner.seeds import derive, random_bytes


@dataclass
class Synthetic(Data):
    """Uniform noise, generated once on the device; the options are explained in `conf/data/synthetic.yaml`.

    Each pixel is a hash of its position in the data set. The images are the same on every device and in every run.
    """

    num_samples: int = 1024
    holdout: int = 128
    size: int = 128
    channels: int = 3
    num_classes: int = 1000
    learnable: bool = False

    def __post_init__(self) -> None:
        check_range(self, "num_samples", least=1)
        check_range(self, "holdout", least=1)
        check_range(self, "size", least=1, most=4096)
        check(self.channels in (1, 3), "channels", self.channels, "images are grayscale or RGB", "1 or 3")
        check_range(self, "num_classes", least=1, most=1_000_000)
        images = self.num_samples + self.holdout + self.learnable * self.num_classes
        gibibytes = images * self.channels * self.size**2 / 2**30
        why = f"{images} images of this size take {gibibytes:.1f} GiB of memory, and the limit is 4 GiB"
        remedy = "use fewer or smaller images: a few thousand suffice for a benchmark"
        check(gibibytes <= 4, "num_samples", self.num_samples, why, remedy)

    def load(self) -> tuple[Samples, Samples]:
        return Noise(self, "train", self.num_samples), Noise(self, "holdout", self.holdout)


class Noise(TensorSamples):
    """Random images of the `split` `train` or `holdout`, which are generated on the device when they are first used."""

    def __init__(self, options: Synthetic, split: str, count: int):
        shape, names = (options.channels, options.size, options.size), [str(c) for c in range(options.num_classes)]
        images = torch.empty(count, *shape, dtype=torch.uint8, device="meta")
        generator = torch.Generator().manual_seed(derive(0, "synthetic", f"{split} targets"))
        targets = torch.randint(options.num_classes, (count,), generator=generator)
        # The variance of a uniform variable in [0, 1] is 1/12, and that of the mean of two is 1/24.
        std = 24**-0.5 if options.learnable else 12**-0.5
        super().__init__(images, targets, names, (0.5,) * options.channels, (std,) * options.channels)
        self._split, self._learnable = split, options.learnable

    def display_images(self, indices: list[int]) -> torch.Tensor:
        if self.inputs.is_meta:
            self._move(torch.device("cpu"))
        return super().display_images(indices)

    def _move(self, device: torch.device) -> None:
        if self.inputs.is_meta:
            self.inputs = _noise(self._split, len(self), self.shape, device)
            if self._learnable:
                patterns = _noise("patterns", self.num_classes, self.shape, device)
                self.inputs = self.inputs // 2 + patterns[self.targets.to(device)] // 2
        super()._move(device)


def _noise(name: str, count: int, shape: tuple[int, int, int], device: torch.device) -> torch.Tensor:
    values = random_bytes(derive(0, "synthetic", name), count * math.prod(shape), device)
    return values.view(count, *shape)
