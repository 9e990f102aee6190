"""The interface of data sets: the options of a data set load the training and the evaluation samples."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

if TYPE_CHECKING:
    import torch

    from runner.batching import MicroBatch


class Batch(NamedTuple):
    """A micro-batch on the device of the model."""

    inputs: torch.Tensor
    """float32 [n, channels, height, width], normalized."""
    targets: torch.Tensor
    """int64 [n]: class indices."""


class DataError(Exception):
    """Raised when samples cannot be read during a run.

    Args:
        what: a file, or the worker processes.
        why: what went wrong.
        remedy: what the user can do about it.
    """

    def __init__(self, what: object, why: str, remedy: str):
        super().__init__(what, why, remedy)
        self.what, self.why, self.remedy = what, why, remedy

    def __str__(self) -> str:
        return f"{self.what}: {self.why}\n  {self.remedy}"


class Samples(ABC):
    """A map-style data set of labeled images, which also orders, augments and batches its samples."""

    num_classes: int
    class_names: list[str]
    shape: tuple[int, int, int]
    """(channels, height, width) of one input."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def batches(self, micros: Iterable[MicroBatch], seed: int, device: torch.device) -> Iterator[Batch]:
        """Yield shuffled and augmented training batches.

        Args:
            micros: positions of each micro-batch in the sample stream.
            seed: determines the order of the samples and, with epoch and sample index, their augmentation.
            device: device of the batches.
        """

    @abstractmethod
    def in_order(self, batch_size: int, shard: tuple[int, int], device: torch.device) -> Iterator[Batch]:
        """Yield the samples of one shard in order, each once, without augmentation.

        Args:
            batch_size: number of samples in a batch; the last batch may be smaller.
            shard: (index, count).
            device: device of the batches.
        """

    @abstractmethod
    def display_images(self, indices: list[int]) -> torch.Tensor:
        """Return samples as images to look at, not normalized: uint8 [n, 1 or 3, height, width], on the CPU."""

    def extra_results(self) -> dict[str, Any]:
        """Return entries for `result.json`, such as the number of skipped files."""
        return {}


def shard_bounds(length: int, shard: tuple[int, int]) -> tuple[int, int]:
    """Return the samples [start, stop) of shard (index, count); shard sizes differ by at most one."""
    index, count = shard
    return length * index // count, length * (index + 1) // count


@dataclass
class Data(ABC):
    """The options of a data set, which `load` reads."""

    may_change_on_resume: ClassVar[tuple[str, ...]] = ()
    """Options that may differ on resume, as they do not affect the samples."""

    @abstractmethod
    def load(self) -> tuple[Samples, Samples]:
        """Return the training samples and the held-out samples, which evaluations use.

        Raises:
            ConfigError: if files are missing or damaged.
        """
