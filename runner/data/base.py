"""The interface of data sets: `Data` holds options and loads samples, and `Samples` yields batches of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

import torch

from runner.batching import MicroBatch
from runner.config.errors import ConfigError, check
from runner.system.trees import Tree, map_tensors, num_rows

IGNORED = -100
"""The class of targets that the cross-entropy ignores, as in torch."""


class Batch(NamedTuple):
    """A micro-batch of n samples on the device of the model; the first dimension of each tensor is n."""

    inputs: Tree
    """[n, *shape], as the model takes them: float32 [n, channels, height, width] for images, normalized. A tuple are
    several inputs, and a dict inputs by name."""
    targets: Tree
    """[n, …], as the loss takes them: class indices int64 [n], or probabilities or values float32 [n, m]; or a tree."""


class CollatedBatch(Batch):
    """A `Batch` that `collate` of the user has made of `num_samples`, of which each tensor may have other rows."""

    def __new__(cls, inputs: Tree, targets: Tree, num_samples: int | None = None) -> CollatedBatch:
        batch: Any = super().__new__(cls, inputs, targets)
        batch.num_samples = num_samples
        return batch


def num_samples_of(batch: Batch) -> int:
    """Return the number of samples in a batch."""
    return getattr(batch, "num_samples", None) or num_rows(batch.targets)


class Collated(NamedTuple):
    """A micro-batch of samples that are not divided into inputs and targets, for a user's step.

    Args:
        batch: the samples in the form in which `collate` returns them.
        num_samples: their number.
    """

    batch: Tree
    num_samples: int


class DataError(Exception):
    """Raised when samples cannot be read during a run: `what` failed, `why`, and what the user can do about it."""

    def __init__(self, what: object, why: str, remedy: str):
        super().__init__(what, why, remedy)
        self.what, self.why, self.remedy = what, why, remedy

    def __str__(self) -> str:
        return f"{self.what}: {self.why}\n  {self.remedy}"


class Samples(ABC):
    """A data set that orders, augments and batches its samples; there is no collate function."""

    shape: Tree
    """Shape of one input, such as (channels, height, width); of several inputs, a tuple or dict of their shapes."""

    num_workers: int = 0
    """Number of worker processes that load training batches, in each process of the run."""

    has_tokens: bool | None = False
    """Whether an input is the indices of tokens in a vocabulary, and no numbers to compute with; None if it may be."""

    example: Any = None
    """A batch of one sample, like which a plan makes batches; None if `batches` itself works with fake tensors."""

    weights: torch.Tensor | None = None
    """The weights with which training samples are drawn (see `SampleOrder`); None if each comes once an epoch."""

    @abstractmethod
    def __len__(self) -> int: ...

    @property
    def length(self) -> int | None:
        """The number of samples; None of a stream, which has none."""
        return len(self)

    def state(self) -> dict[str, Any]:
        """Return, as plain values and tensors, what a resume needs besides the number of the step to go on."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned in another session; raises `UnexpectedContentError` if it is something else."""

    @abstractmethod
    def batches(self, micros: Iterable[MicroBatch], seed: int, device: torch.device) -> Iterator[Batch]:
        """Yield shuffled and augmented training batches, one for each of `micros`.

        `micros` are ranges of positions in the stream of shuffled samples. `seed` determines their order; the
        augmentation of a sample depends on it, the epoch and the index of the sample. Raises `DataError` if samples
        cannot be read.
        """

    @abstractmethod
    def in_order(self, batch_size: int, shard: tuple[int, int], device: torch.device) -> Iterator[Batch]:
        """Yield batches of the shard (index, number of shards), in order and without augmentation.

        Each sample is used once. A data set may leave out samples that cannot be read.
        """

    def copied_values(self) -> dict[str, Any]:
        """Return the numbers and texts in attributes of a data set of which worker processes have copies, by name."""
        return {}

    def extra_results(self, all_gather: Callable[[Any], list[Any]]) -> dict[str, Any]:
        """Return entries for `result.json`, such as the number of skipped files; as `Workload.extra_results`."""
        return {}

    def fingerprint(self) -> str:
        """Return a SHA-256 of the whole data set, training and held-out samples; empty if its options determine it."""
        return ""

    def labels(self) -> torch.Tensor:
        """Return the class index of every sample, int64 [n] on the CPU; raises `ConfigError` if there is none."""
        why = "no class of each sample is known without reading all of them"
        remedy = "pass arrays, one of them the classes (in a dict, `label`), or a data set with a list `targets`"
        raise ConfigError("sampler", "weighted", why, remedy)

    def joined(self, other: Samples) -> Samples:
        """Return the samples of both, for an evaluation; raises `ConfigError` if they cannot be joined."""
        raise ConfigError("--split", "all", f"{type(self).__name__} cannot be joined", "evaluate each split")

    def close(self) -> None:
        """End the processes that were started for `batches` and `in_order`; they are started again when needed."""


class LabeledSamples(Samples):
    """Images for classification, each with a class index as its target."""

    num_classes: int
    class_names: list[str]
    shape: tuple[int, int, int]
    """(channels, height, width) of one input."""

    def labels(self) -> torch.Tensor:
        """Return the class index of every sample, int64 [n] on the CPU."""
        return torch.cat([batch.targets for batch in self.in_order(256, (0, 1), torch.device("cpu"))])

    def in_order_with_indices(
        self, batch_size: int, shard: tuple[int, int], device: torch.device
    ) -> Iterator[tuple[torch.Tensor, Batch]]:
        """Yield (indices of the samples, int64 [n] on `device`; batch) for each batch of `in_order`.

        A subclass whose `in_order` may leave out samples must override this method.
        """
        start, _ = shard_bounds(len(self), shard)
        for batch in self.in_order(batch_size, shard, device):
            stop = start + len(batch.targets)
            yield torch.arange(start, stop, device=device), batch
            start = stop

    @abstractmethod
    def display_images(self, indices: list[int]) -> torch.Tensor:
        """Return samples without normalization, uint8 [n, 1 or 3, height, width] on the CPU; black if unreadable."""

    def image_input(self) -> dict[str, Any] | None:
        """Return the fields of the `ImageInput` that converts image files to inputs; None if there is none."""
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
        """Return the `mean` and the `std` of `targets` and, in some data sets, of flattened `inputs`, as lists."""
        return {"targets": {"mean": self.target_mean, "std": self.target_std}}


def copied(tree: Tree) -> Tree:
    """Return `tree` with a copy of each tensor, for code of the user, which may change its arguments in place."""
    return map_tensors(torch.Tensor.clone, tree)


def shape_of(inputs: Tree) -> Tree:
    """Return the shape of one input, given several, [n, …]; see `Samples.shape`."""
    return map_tensors(lambda each: tuple(each.shape[1:]), inputs)


def may_be_tokens(inputs: Tree) -> bool | None:
    """Return `Samples.has_tokens` of samples of a user, given several inputs: None if they are a tensor of integers."""
    is_whole = isinstance(inputs, torch.Tensor) and not (inputs.is_floating_point() or inputs.is_complex())
    return None if is_whole and inputs.dtype != torch.bool else False


def shard_bounds(length: int, shard: tuple[int, int]) -> tuple[int, int]:
    """Return (start, stop), the sample indices of the shard (index, number of shards); sizes differ by at most one."""
    index, count = shard
    return length * index // count, length * (index + 1) // count


Sampler = Literal["uniform", "weighted"]
"""How training samples are drawn: each once an epoch, or each class with the same probability."""


def class_weights(labels: torch.Tensor) -> torch.Tensor:
    """Return weights of samples with which each class is drawn with the same probability, float64 [n].

    Raises:
        ConfigError: if torch cannot draw with them.
    """
    why = f"{int(labels.min())} is the target of a sample, and no class"
    check(int(labels.min()) >= 0, "sampler", "weighted", why, "leave out samples without a class")
    why, most = f"torch draws from at most 2²⁴ samples, and there are {len(labels):,}", 2**24
    check(len(labels) <= most, "sampler", "weighted", why, "workload.class_weights, or workload.balance_classes")
    _, inverse, counts = labels.unique(return_inverse=True, return_counts=True)
    return counts.double().reciprocal()[inverse]


@dataclass
class Data(ABC):
    """The options of a data set; on resume, `changed` says to `refuse` or to `accept` other samples than before."""

    may_change_on_resume: ClassVar[tuple[str, ...]] = ()
    keeps_double = False
    """That of the precision, which `Run` sets before the data is loaded."""

    changed: Literal["refuse", "accept"] = field(default="refuse", kw_only=True)

    @classmethod
    def untrusted_values(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Return new values for saved options that were not typed again: accepting changed samples is not resumed."""
        return {"changed": "refuse"} if "changed" in values else {}

    @abstractmethod
    def load(self) -> tuple[Samples, Samples]:
        """Load the training samples and the held-out samples; raises `ConfigError` if this is impossible."""

    def splits(self, saved: Mapping[str, Any]) -> dict[str, Callable[[], Samples]]:
        """Return functions that load each split: `train`, `val` (held out), `all`, and `test` if there is one.

        The first is the one to evaluate of data that the run was not trained on. `saved`, the signature of the
        checkpoint, has the columns and the normalization to use; it may be empty. Raises `ConfigError` if the data
        lacks some of it.
        """
        return two_splits(*self.load())


def two_splits(train: Samples, held_out: Samples) -> dict[str, Callable[[], Samples]]:
    """Return `Data.splits` of a data set whose samples have been loaded."""
    return {"val": lambda: held_out, "train": lambda: train, "all": lambda: train.joined(held_out)}
