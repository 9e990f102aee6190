"""A data set: images and labels from a NumPy file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch

from runner.config.errors import check
from runner.config.limits import Range
from runner.data.base import Data, Samples
from runner.data.memory import TensorSamples


@dataclass
class Arrays(Data):
    """Images and labels as `numpy.savez(file, images=…, labels=…)` wrote them.

    Args:
        file: an `.npz` file with `images`, uint8 [n, channels, height, width], and `labels`, integers [n]: the index of
            each image's class, counted from 0.
        holdout: the share of the samples, taken from the end, that is kept for evaluation.
        flip: mirror half of the training images.
    """

    file: str
    holdout: Annotated[float, Range(above=0, most=0.9)] = 0.2
    flip: bool = False

    def load(self) -> tuple[Samples, Samples]:
        path = Path(self.file).expanduser()
        check(path.is_file(), "file", self.file, "there is no such file", "data.file=PATH of an .npz file")
        import numpy  # here, not above: errors in a config are reported before it is loaded

        with numpy.load(path, allow_pickle=False) as arrays:
            images, labels = torch.from_numpy(arrays["images"]), torch.from_numpy(arrays["labels"]).long()
        pixels = images.double() / 255
        mean, std = (tuple(f(pixels, dim=(0, 2, 3)).tolist()) for f in (torch.mean, torch.std))
        names = [str(label) for label in range(int(labels.max()) + 1)]
        cut = len(images) - max(1, round(self.holdout * len(images)))
        train = TensorSamples(images[:cut], labels[:cut], names, mean, std, flip=self.flip)
        return train, TensorSamples(images[cut:], labels[cut:], names, mean, std)
