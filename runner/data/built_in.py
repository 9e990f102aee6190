"""Data sets that need no download: the handwritten digits that ship with scikit-learn, and random images."""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import torch

from runner.config.errors import check
from runner.config.limits import PositiveInt, Range, check_range
from runner.data.augment import Augmented
from runner.data.base import Data, Samples, two_splits
from runner.data.memory import TensorSamples
from runner.seeds import derive, random_bytes


@dataclass
class Digits(Augmented):
    """The handwritten digits of scikit-learn, 8×8 pixels with 17 gray levels; for options, see `conf/data/digits.yaml`.

    Alpaydin and Kaynak, Optical Recognition of Handwritten Digits (UCI, 1998).
    """

    size: Annotated[int, Range(least=8, most=512)] = 28
    holdout: Annotated[float, Range(above=0, most=0.9)] = 0.2
    crop: int = 0

    def __post_init__(self) -> None:
        check_range(self, "crop", Range(least=0, most=self.size // 2))

    def splits(self, saved: Mapping[str, Any]) -> dict[str, Callable[[], Samples]]:
        return two_splits(*self.load(saved.get("image")))

    def load(self, normalization: Mapping[str, list[float]] | None = None) -> tuple[Samples, Samples]:
        table = torch.from_numpy(read_table())
        images = table[:, :64].reshape(-1, 1, 8, 8).to(torch.float32) / 16
        if self.size != 8:
            images = torch.nn.functional.interpolate(images, size=(self.size, self.size), mode="bilinear")
        mean, std = images.mean().item(), images.std().item()
        if normalization and len(normalization["mean"]) == 1:
            [mean], [std] = normalization["mean"], normalization["std"]
        # Independent of the run's seed, so that runs with different seeds are evaluated on the same samples.
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(derive(0, "digits")))
        held_out = max(1, round(self.holdout * len(images)))
        names = [str(digit) for digit in range(10)]

        inputs, targets = (images - mean) / std, table[:, 64].to(torch.int64)

        def samples(rows: torch.Tensor, **options: Any) -> TensorSamples:
            return TensorSamples(inputs[rows], targets[rows], names, (mean,), (std,), **options)

        return samples(order[held_out:], crop=self.crop, augment=self.transform((mean,))), samples(order[:held_out])


@functools.cache  # reading takes most of the time to start a short run, and a process may train several runs
def read_table():  # no return type: annotating numpy.ndarray would require an import at the top
    """Return an array with a row per image, float64 [1797, 65]: 64 pixels with values from 0 to 16, and the class."""
    import numpy

    # Read from the files of the package: `import sklearn.datasets` takes most of a second.
    package = importlib.metadata.distribution("scikit-learn")
    return numpy.loadtxt(str(package.locate_file("sklearn/datasets/data/digits.csv.gz")), delimiter=",")


@dataclass
class Synthetic(Data):
    """Uniform noise, generated once on the device; the options are explained in `conf/data/synthetic.yaml`.

    Each pixel is a hash of its position in the data set. The images are the same on every device and in every run.
    """

    num_samples: PositiveInt = 1024
    holdout: PositiveInt = 128
    size: Annotated[int, Range(least=1, most=4096)] = 128
    channels: int = 3
    num_classes: Annotated[int, Range(least=1, most=1_000_000)] = 1000

    def __post_init__(self) -> None:
        check(self.channels in (1, 3), "channels", self.channels, "images are grayscale or RGB", "1 or 3")
        images = self.num_samples + self.holdout
        gibibytes = images * self.channels * self.size**2 / 2**30
        why = f"{images} images of this size take {gibibytes:.1f} GiB of memory, and the limit is 4 GiB"
        check(gibibytes <= 4, "num_samples", self.num_samples, why, "use fewer or smaller images")

    def load(self) -> tuple[Samples, Samples]:
        return Noise(self, "train", self.num_samples), Noise(self, "holdout", self.holdout)


class Noise(TensorSamples):
    """Random images of the `split` `train` or `holdout`, which are generated on the device when they are first used."""

    def __init__(self, options: Synthetic, split: str, count: int):
        shape, names = (options.channels, options.size, options.size), [str(c) for c in range(options.num_classes)]
        images = torch.empty(count, *shape, dtype=torch.uint8, device="meta")
        generator = torch.Generator().manual_seed(derive(0, "synthetic", f"{split} targets"))
        targets = torch.randint(options.num_classes, (count,), generator=generator)
        std = 12**-0.5  # of a uniform variable in [0, 1]
        super().__init__(images, targets, names, (0.5,) * options.channels, (std,) * options.channels)
        self._seed = derive(0, "synthetic", split)

    def _move(self, device: torch.device) -> None:
        if self.inputs.is_meta:
            self.inputs = random_bytes(self._seed, self.inputs.numel(), device).view(self.inputs.shape)
        super()._move(device)
