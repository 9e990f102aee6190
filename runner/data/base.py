"""The interface of data sets: `Data` holds options and loads samples, and `Samples` yields batches of them.

Inputs and targets may be any tensors. What only some workloads need, such as the names of classes, is in subclasses of
`Samples`: `LabeledSamples` for classification, `RegressionSamples` for regression.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from runner.config.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from runner.batching import MicroBatch


class Batch(NamedTuple):
    """A micro-batch of n samples on the device of the model."""

    inputs: torch.Tensor
    """[n, *shape], as the model takes them: float32 [n, channels, height, width] for images, normalized."""
    targets: torch.Tensor
    """[n, …], as the loss takes them.

    For classification, class indices int64 [n] or, with mixup or CutMix, probabilities float32 [n, num_classes]. For
    regression, the values to predict float32 [n, num_targets].
    """


class DataError(Exception):
    """Raised when samples cannot be read during a run: `what` failed, `why`, and what the user can do about it."""

    def __init__(self, what: object, why: str, remedy: str):
        super().__init__(what, why, remedy)
        self.what, self.why, self.remedy = what, why, remedy

    def __str__(self) -> str:
        return f"{self.what}: {self.why}\n  {self.remedy}"


class Samples(ABC):
    """A data set that orders, augments and batches its samples; there is no collate function.

    A data set of sequences of different lengths must pad the sequences of a batch to the same length, and mark the
    padding in the targets.
    """

    shape: tuple[int, ...]
    """Shape of one input, such as (channels, height, width)."""

    num_workers: int = 0
    """Number of worker processes that load training batches, in each process of the run."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def batches(self, micros: Iterable[MicroBatch], seed: int, device: torch.device) -> Iterator[Batch]:
        """Yield shuffled and augmented training batches, one for each of `micros`.

        Args:
            micros: the micro-batches of this process, as ranges of positions in the stream of shuffled samples.
            seed: the seed for the order of the samples. The augmentation of a sample depends on this seed, on the epoch
                and on the index of the sample.
            device: device of the batches.

        Raises:
            DataError: if samples cannot be read.
        """

    def fake_batches(self, micros: Iterable[MicroBatch], device: torch.device) -> Iterator[Batch] | None:
        """Return batches like those of `batches`, but made of fake tensors, which have no values.

        Called inside `runner.system.fake_tensors.fake_tensors`, so that new tensors are fake. Return None (the default)
        if `batches` itself works with fake tensors.
        """
        return None

    @abstractmethod
    def in_order(self, batch_size: int, shard: tuple[int, int], device: torch.device) -> Iterator[Batch]:
        """Yield batches of the samples of one shard, in order and without augmentation; each sample is used once.

        A data set may leave out samples that cannot be read.

        Args:
            batch_size: number of samples in a batch; the last batch may be smaller.
            shard: (index of the shard, number of shards).
            device: device of the batches.

        Raises:
            DataError: if samples cannot be read.
        """

    def extra_results(self, all_gather: Callable[[Any], list[Any]]) -> dict[str, Any]:
        """Return entries for `result.json`, such as the number of skipped files; as `Workload.extra_results`."""
        return {}

    def fingerprint(self) -> str:
        """Return a SHA-256 of the whole data set, training and held-out samples, as hexadecimal digits.

        It shows that a data set has changed between two sessions. Empty (the default) if the options of the data set
        determine its samples.
        """
        return ""

    def joined(self, other: Samples) -> Samples:
        """Return the samples of both, for an evaluation.

        Raises:
            ConfigError: with the key `--split`, if this is not possible, as with samples of another type.
        """
        why = f"{type(self).__name__} cannot be joined"
        raise ConfigError("--split", "all", why, "evaluate --split train and --split val")

    def close(self) -> None:
        """End the processes that were started for `batches` and `in_order`; they are started again when needed."""


class LabeledSamples(Samples):
    """Images for classification, each with a class index as its target."""

    num_classes: int
    class_names: list[str]
    shape: tuple[int, int, int]
    """(channels, height, width) of one input."""

    def labels(self) -> torch.Tensor:
        """Return the class index of every sample, int64 [n] on the CPU.

        This implementation loads all samples. Whether samples that cannot be read are included depends on the data set.
        """
        import torch

        return torch.cat([batch.targets for batch in self.in_order(256, (0, 1), torch.device("cpu"))])

    def in_order_with_indices(
        self, batch_size: int, shard: tuple[int, int], device: torch.device
    ) -> Iterator[tuple[torch.Tensor, Batch]]:
        """Yield (indices of the samples in the data set, int64 [n] on `device`; batch) for each batch of `in_order`.

        A subclass whose `in_order` may leave out samples must override this method.
        """
        import torch

        start, _ = shard_bounds(len(self), shard)
        for batch in self.in_order(batch_size, shard, device):
            stop = start + len(batch.targets)
            yield torch.arange(start, stop, device=device), batch
            start = stop

    @abstractmethod
    def display_images(self, indices: list[int]) -> torch.Tensor:
        """Return samples as images for display, without normalization: uint8 [n, 1 or 3, height, width] on the CPU.

        The image of a sample that cannot be read is black.
        """

    def image_input(self) -> dict[str, Any] | None:
        """Return the fields of the `ImageInput` that converts image files to inputs, saved with every checkpoint.

        Return None (the default) if image files cannot be converted to inputs.
        """
        return None


class RegressionSamples(Samples):
    """Samples with values to predict, float32 [num_targets] each.

    The targets may be standardized: the value in the units of the data is `target · target_std + target_mean`.
    """

    input_names: Sequence[str] = ()
    """The names of the inputs, if an input is a list of numbers that have names."""
    target_names: list[str]
    target_mean: list[float]
    target_std: list[float]

    def standardization(self) -> dict[str, dict[str, list[float]]]:
        """Return the `mean` and the `std` of `targets` and, in some data sets, of flattened `inputs`, plain for JSON.

        The result has the form `{"targets": {"mean": […], "std": […]}, …}`.
        """
        return {"targets": {"mean": self.target_mean, "std": self.target_std}}


def shard_bounds(length: int, shard: tuple[int, int]) -> tuple[int, int]:
    """Return (start, stop), the sample indices of the shard (index, number of shards); sizes differ by at most one."""
    index, count = shard
    return length * index // count, length * (index + 1) // count


@dataclass
class Data(ABC):
    """The base class for the options of a data set; `load` returns the samples.

    Args:
        changed: on resume, `refuse` other samples than those of the checkpoint, or `accept` them.
    """

    may_change_on_resume: ClassVar[tuple[str, ...]] = ()
    """Options that may differ on resume, because they do not affect the samples."""

    changed: str = field(default="refuse", kw_only=True)

    @classmethod
    def untrusted_values(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Return new values for saved options that were not typed again: accepting changed samples is not resumed."""
        return {"changed": "refuse"} if "changed" in values else {}

    @abstractmethod
    def load(self) -> tuple[Samples, Samples]:
        """Load and return the training samples and the held-out samples, which are used for evaluation.

        Raises:
            ConfigError: if files are missing or damaged, or an option does not suit the data.
        """

    def splits(self, saved: Mapping[str, Any]) -> dict[str, Callable[[], Samples]]:
        """Return functions that load the samples of each split, for the model of a checkpoint.

        The splits are `train`, `val` (the held-out samples), `all`, and `test` if there is one. The first of them is
        the one to evaluate of data that the run was not trained on. This implementation is for data sets whose
        normalization and columns do not depend on the samples.

        Args:
            saved: the signature of the checkpoint (see `Workload.signature`), which has the columns and the
                normalization to use; empty if the checkpoint has none.

        Raises:
            ConfigError: as in `load`, or if the data lacks what the model was trained on, such as a column.
        """
        return two_splits(*self.load())


def two_splits(train: Samples, held_out: Samples) -> dict[str, Callable[[], Samples]]:
    """Return `Data.splits` of a data set whose samples have been loaded."""
    return {"val": lambda: held_out, "train": lambda: train, "all": lambda: train.joined(held_out)}
