"""The 1,797 handwritten digits that scikit-learn ships: real data on every machine, without a download."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

import torch

from runner.config.errors import check_range
from runner.data.base import Data, Samples
from runner.data.memory import TensorSamples
from runner.seeds import derive


@dataclass
class Digits(Data):
    """Alpaydin and Kaynak, Optical Recognition of Handwritten Digits (UCI, 1998): 8×8 pixels, 17 grey levels.

    Args:
        size: pixels of a side; the images are scaled to it (8 leaves them as they are).
        holdout: share of the samples, drawn once and for all runs, that is kept for evaluation.
        crop: pixels that training images are shifted by at most.
    """

    size: int = 28
    holdout: float = 0.2
    crop: int = 0

    def __post_init__(self) -> None:
        check_range(self, "size", least=8, most=512)
        check_range(self, "holdout", above=0, most=0.9)
        check_range(self, "crop", least=0, most=self.size // 2)

    def load(self) -> tuple[Samples, Samples]:
        table = torch.from_numpy(_table())
        images = table[:, :64].reshape(-1, 1, 8, 8).to(torch.float32) / 16
        if self.size != 8:
            images = torch.nn.functional.interpolate(images, size=(self.size, self.size), mode="bilinear")
        mean, std = images.mean().item(), images.std().item()
        # Not the run's seed: runs with different seeds are to be compared on the same held-out samples.
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(derive(0, "digits")))
        held_out = max(1, round(self.holdout * len(images)))
        names = [str(digit) for digit in range(10)]

        def samples(indices: torch.Tensor, crop: int) -> TensorSamples:
            inputs, targets = (images[indices] - mean) / std, table[indices, 64].to(torch.int64)
            return TensorSamples(inputs, targets, names, (mean,), (std,), crop=crop)

        return samples(order[held_out:], self.crop), samples(order[:held_out], 0)


def _table():  # -> numpy array: naming it would import numpy
    """One row a digit: 64 pixels from 0 to 16, and the class."""
    import numpy  # here, not above: the config's errors are told before it is loaded

    # Read from the package's files: `import sklearn.datasets` takes most of a second, for this one table.
    spec = importlib.util.find_spec("sklearn")
    assert spec is not None, "scikit-learn is among the dependencies"
    assert spec.origin is not None
    return numpy.loadtxt(Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",")
