"""Random images of any size and number of classes: for measuring, where the data itself does not matter."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from runner.config import check, check_range
from runner.data.base import Data, Samples
from runner.data.memory import TensorSamples
from runner.seeds import derive

_MOST_BYTES = 4 << 30


@dataclass
class Synthetic(Data):
    """A pool of noise images, made once, held on the device, and drawn from like any data set.

    Made on the CPU and not from the run's seed: the same on every device and in every run.

    Args:
        num_samples: training images.
        holdout: held-out images.
        size: of a side, in pixels.
        channels: 1 (grey) or 3 (colour).
        num_classes: labels are drawn from so many.
        learnable: half of each image is its class's pattern instead of noise; otherwise there is nothing to learn.
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
        check(self.channels in (1, 3), "channels", self.channels, "images are grey or coloured", "1 or 3")
        check_range(self, "num_classes", least=1, most=1_000_000)
        images = self.num_samples + self.holdout + self.learnable * self.num_classes
        gibibytes = images * self.channels * self.size**2 / (1 << 30)
        check(
            gibibytes * (1 << 30) <= _MOST_BYTES,
            "num_samples",
            self.num_samples,
            f"{images} images of this size take {gibibytes:.1f} GiB of memory, and at most 4 are allowed",
            "for measuring a few thousand images do: they come again every epoch",
        )

    def load(self) -> tuple[Samples, Samples]:
        patterns = self._noise("patterns", self.num_classes) if self.learnable else None
        return self._samples("train", self.num_samples, patterns), self._samples("holdout", self.holdout, patterns)

    def _samples(self, part: str, count: int, patterns: torch.Tensor | None) -> TensorSamples:
        images = self._noise(part, count)
        targets = torch.randint(self.num_classes, (count,), generator=_generator(f"{part} targets"))
        if patterns is not None:
            images = images // 2 + patterns[targets] // 2
        names = [str(number) for number in range(self.num_classes)]
        # The variance of a number that is uniform in [0, 1] is 1/12, and half that of the mean of two.
        std = 12**-0.5 if patterns is None else 24**-0.5
        return TensorSamples(images, targets, names, (0.5,) * self.channels, (std,) * self.channels)

    def _noise(self, name: str, count: int) -> torch.Tensor:
        shape = (count, self.channels, self.size, self.size)
        return torch.randint(256, shape, dtype=torch.uint8, generator=_generator(name))


def _generator(name: str) -> torch.Generator:
    return torch.Generator().manual_seed(derive(0, "synthetic", name))
