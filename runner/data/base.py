"""The contract: a data set is two collections of samples, and a collection streams batches at given positions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

if TYPE_CHECKING:
    import torch

    from runner.batching import MicroBatch


class Batch(NamedTuple):
    """Inputs [n, channels, height, width], float32, normalised, and their classes, int64 [n], on the device."""

    inputs: torch.Tensor
    targets: torch.Tensor


class DataError(Exception):
    """Samples cannot be read while a run is under way: what, why not, and what to do."""

    def __init__(self, what: object, why: str, remedy: str):
        super().__init__(what, why, remedy)
        self.what, self.why, self.remedy = what, why, remedy

    def __str__(self) -> str:
        return f"{self.what}: {self.why}\n  {self.remedy}"


class Samples(ABC):
    """A collection of labelled images that streams batches."""

    num_classes: int
    class_names: list[str]
    shape: tuple[int, int, int]
    """(channels, height, width) of one input."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def batches(self, micros: Iterable[MicroBatch], seed: int, device: torch.device) -> Iterator[Batch]:
        """The batches at the positions of `micros` in the stream of `seed`, augmented by (seed, epoch, sample)."""

    @abstractmethod
    def in_order(self, batch_size: int, shard: tuple[int, int], device: torch.device) -> Iterator[Batch]:
        """Part `shard` = (index, count) of the samples, once each, in order, not augmented; the last may be short."""

    @abstractmethod
    def display_images(self, indices: list[int]) -> torch.Tensor:
        """Samples as a person would see them: uint8 [n, 1 or 3, height, width], on the CPU."""

    def extra_results(self) -> dict[str, Any]:
        """What `result.json` must tell of these samples (those that were skipped)."""
        return {}


def shard_bounds(length: int, shard: tuple[int, int]) -> tuple[int, int]:
    """The samples [start, stop) of part `shard` = (index, count): parts differ by one sample at most."""
    index, count = shard
    return length * index // count, length * (index + 1) // count


@dataclass
class Data(ABC):
    """A data set's options; `load` gives its samples."""

    may_change_on_resume: ClassVar[tuple[str, ...]] = ()
    """Options that may differ on a resume: they change how samples are read, not which."""

    @abstractmethod
    def load(self) -> tuple[Samples, Samples]:
        """The training samples and the held-out ones.

        Raises:
            ConfigError: when they are not there, with what to do.
        """
