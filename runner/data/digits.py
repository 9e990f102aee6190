"""The 1,797 handwritten digits that ship with scikit-learn: real data without a download."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from runner.config.errors import check_range
from runner.data.augment import Augmented
from runner.data.base import Samples, two_splits
from runner.data.memory import TensorSamples
from runner.seeds import derive


@dataclass
class Digits(Augmented):
    """The handwritten digits of scikit-learn, 8×8 pixels with 17 gray levels; for options, see `conf/data/digits.yaml`.

    Alpaydin and Kaynak, Optical Recognition of Handwritten Digits (UCI, 1998).
    """

    size: int = 28
    holdout: float = 0.2
    crop: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "size", least=8, most=512)
        check_range(self, "holdout", above=0, most=0.9)
        check_range(self, "crop", least=0, most=self.size // 2)

    def load(self) -> tuple[Samples, Samples]:
        return self._load()

    def splits(self, saved: Mapping[str, Any]) -> dict[str, Callable[[], Samples]]:
        return two_splits(*self._load(saved.get("image")))

    def _load(self, normalization: Mapping[str, list[float]] | None = None) -> tuple[Samples, Samples]:
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

        return samples(order[held_out:], crop=self.crop, augment=self.transforms((mean,))), samples(order[:held_out])


@functools.cache  # reading takes most of the time to start a short run, and a process may train several runs
def read_table():  # no return type: annotating numpy.ndarray would require an import at the top
    """Return an array with a row per image, float64 [1797, 65]: 64 pixels with values from 0 to 16, and the class."""
    import numpy

    # Read from the files of the package: `import sklearn.datasets` takes most of a second.
    spec = importlib.util.find_spec("sklearn")
    assert spec is not None, "scikit-learn is a dependency of this project"
    assert spec.origin is not None
    return numpy.loadtxt(Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",")
