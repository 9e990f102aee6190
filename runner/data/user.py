"""Data sets of the user: `data=FILE.py:NAME`, or the argument `data` of `runner.train`."""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, TensorDataset, default_collate

from runner.batching import MicroBatch, SampleOrder
from runner.config import user_code
from runner.config.errors import ABSENT, ConfigError, check, check_range, described
from runner.data.base import Batch, Data, DataError, Samples, shard_bounds
from runner.data.image_files import to_device
from runner.data.memory import ArraySamples
from runner.data.workers import Workers, call_shared
from runner.seeds import derive, seeded

log = logging.getLogger(__name__)

_HASHED = 16
"""The number of samples of a map-style data set that its fingerprint covers."""


@dataclass
class UserData(Data):
    """Training and held-out samples, or samples of which a share is held out; see `conf/data/_user.yaml`.

    They are two data sets, or one; or a function that returns them. A data set is a map-style `Dataset`, a list of
    (input, target), or tensors or arrays (inputs, targets).
    """

    holdout: float = 0.2
    workers: int = 0
    prefetch: int = 2
    timeout: float = 120

    may_change_on_resume: ClassVar[tuple[str, ...]] = ("workers", "prefetch", "timeout")

    def __post_init__(self) -> None:
        check_range(self, "holdout", above=0, most=0.9)
        check_range(self, "workers", least=0, most=256)
        check_range(self, "prefetch", least=1, most=64)
        check_range(self, "timeout", least=1, most=86400)

    def load(self) -> tuple[Samples, Samples]:
        given: Any = user_code.find("data")
        check(given is not None, "", ABSENT, "no data is given", "data=FILE.py:NAME, or define data in the file")
        with user_code.errors_of("data"), seeded(derive(0, "user data")):  # the same on all ranks, and for all seeds
            made: Any = given() if callable(given) and not hasattr(given, "__getitem__") else given
            sets = [_dataset(each) for each in made] if _is_pair(made) else _split(_dataset(made), self.holdout)
            if all(isinstance(each, TensorDataset) for each in sets):
                content = _sha256(tensor for each in sets for tensor in each.tensors)
                train, held_out = (ArraySamples(*each.tensors, content=content) for each in sets)
            else:
                fetches = [Fetch(each) for each in sets]
                content = _sha256(tensor for fetch in fetches for tensor in fetch.some())
                workers = Workers(self.workers, self.timeout, self.prefetch, fetches if self.workers else None)
                train, held_out = (DatasetSamples(fetches, number, workers, content) for number in range(2))
        why = f"a training input has the shape {list(train.shape)}, a held-out one {list(held_out.shape)}"
        check(train.shape == held_out.shape, "", ABSENT, why, "let both data sets have inputs of one shape")
        first, second = ([*(getattr(each, "class_names", None) or ())] for each in (train, held_out))
        why = f"training samples have the classes {first}, held-out ones {second}: targets mean different classes"
        remedy = "let both have the same classes: ImageFolder(…, allow_empty=True) with an empty directory for a class"
        check(not first or second == first[: len(second)], "", ABSENT, why, remedy)
        for kind, samples in (("training", train), ("held-out", held_out)):
            parts = {"inputs": samples.inputs, "targets": samples.targets} if isinstance(samples, ArraySamples) else {}
            for name, values in parts.items():
                if wrong := int((~values.isfinite()).view(len(values), -1).any(1).sum()):
                    text = "data: %d of %d %s %s have values that are NaN or infinite"
                    log.warning(text, wrong, len(values), kind, name)
        return train, held_out


def _is_pair(given: Any) -> bool:
    """Return whether something is two data sets; (inputs, targets) and a list of two samples are one."""
    if not isinstance(given, tuple | list) or len(given) != 2:
        return False
    return all(isinstance(each, Dataset) for each in given) or (isinstance(given, tuple) and not _are_arrays(given))


def _are_arrays(pair: Iterable[Any]) -> bool:
    return all(hasattr(each, "__array__") for each in pair)  # of torch, NumPy and pandas


def _dataset(given: Any) -> Any:
    """Return a `TensorDataset` of inputs and targets, or another map-style data set; refuse what is neither."""
    name = type(given).__name__
    if isinstance(given, TensorDataset):
        given = given.tensors
    if isinstance(given, Subset) and isinstance(given.dataset, TensorDataset):
        given = tuple(tensor[list(given.indices)] for tensor in given.dataset.tensors)
    if isinstance(given, tuple) and len(given) == 2 and _are_arrays(given):
        inputs, targets = map(_tensor, given)
        why = f"there are {len(inputs)} inputs and {len(targets)} targets"
        check(0 < len(inputs) == len(targets), "", name, why, "pass one target for each input")
        return TensorDataset(_single(inputs), targets)
    remedy = "pass data sets with __len__ and __getitem__, lists of (input, target), or tensors (inputs, targets)"
    check(not isinstance(given, DataLoader), "", name, "the batches are made by the runner", "pass loader.dataset")
    why = "its samples have no index, so that they cannot be shuffled, divided and resumed"
    check(not isinstance(given, IterableDataset), "", name, why, "pass a map-style Dataset, or list(dataset)")
    is_map_style = hasattr(given, "__getitem__") and hasattr(given, "__len__")
    check(is_map_style and not isinstance(given, tuple | dict | str), "", name, "it is no map-style data set", remedy)
    check(len(given) > 0, "", name, "it is empty", "pass one with samples")
    return given


def _tensor(given: Any) -> torch.Tensor:
    """Return a tensor of what is given: a tensor, an array or a table, whose columns may have several types."""
    if isinstance(given, torch.Tensor):
        return given.detach()
    array = given if isinstance(given, np.ndarray) else np.array(given)
    if array.dtype.kind not in "biufc":
        is_number = (array.dtype == object and isinstance(each, Real | np.bool_) for each in array.flat)
        where = next(
            (index for index, found in zip(np.ndindex(array.shape), is_number, strict=True) if not found), None
        )
        if where is not None:
            columns = getattr(given, "columns", range(where[-1] + 1))
            place = f"row {where[0]}" + "".join(f", column {columns[index]}" for index in where[1:2])
            why, remedy = f"{place} is {array[where]!r}, no number", "encode text, dates and categories as numbers"
            raise ConfigError("", type(given).__name__, why, f"{remedy}, and replace what is missing")
        array = np.array(array.tolist())
    wide = array.dtype.kind == "u" and array.dtype.itemsize > 1  # types for which torch has few operations
    return torch.as_tensor(np.ascontiguousarray(array, np.int64 if wide else array.dtype.newbyteorder("=")))


def _single(inputs: torch.Tensor) -> torch.Tensor:
    """Return inputs in float32 if they are in another precision, as float64 of NumPy: precision=64 converts back."""
    return inputs.float() if inputs.is_floating_point() else inputs


def _split(given: Any, holdout: float) -> list[Any]:
    """Divide a data set at random, in a way that does not depend on the seed of a run."""
    count = len(given)
    check(count > 1, "", ABSENT, "a single sample cannot be divided", "pass training and held-out samples")
    order = torch.randperm(count, generator=torch.Generator().manual_seed(derive(0, "holdout")))
    num_held_out = max(1, round(holdout * count))
    return [_dataset(Subset(given, sorted(rows.tolist()))) for rows in (order[num_held_out:], order[:num_held_out])]


def _sha256(tensors: Iterable[torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


class Job(NamedTuple):
    """A batch to load: the indices of its samples, and a seed for each."""

    indices: list[int]
    seeds: list[int]


class Fetch:
    """Loads batches of a map-style data set. While a sample is loaded, `random`, NumPy and torch draw from its seed."""

    def __init__(self, dataset: Any):
        self.dataset = dataset

    def __call__(self, job: Job) -> tuple[torch.Tensor, torch.Tensor]:
        with seeded(0):
            samples = [self._sample(index, seed) for index, seed in zip(job.indices, job.seeds, strict=True)]
        name = type(self.dataset).__name__
        for index, sample in zip(job.indices, samples, strict=True):
            is_pair = isinstance(sample, tuple | list) and len(sample) == 2
            why = f"sample {index} is {type(sample).__name__}, not (input, target)"
            check(is_pair, "data", name, why, "return a pair of tensors, arrays or numbers from __getitem__")
        try:
            inputs, targets = default_collate(samples)
        except (RuntimeError, TypeError) as error:
            why = f"its samples cannot be stacked: {error}"
            raise DataError(name, why, "let all samples have one shape and dtype") from None
        kinds = " and ".join(type(each).__name__ for each in (inputs, targets) if not isinstance(each, torch.Tensor))
        check(not kinds, "data", name, f"its inputs or targets are {kinds}", "return tensors, arrays or numbers")
        return _single(inputs), targets

    def some(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a few samples from the whole data set."""
        count = len(self.dataset)
        indices = [*range(0, count, -(-count // _HASHED))]
        return self(Job(indices, indices))

    def _sample(self, index: int, seed: int) -> Any:
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)
        try:
            return self.dataset[index]
        except Exception as error:
            remedy = "correct its __getitem__; log.txt has the traceback"
            raise DataError(f"sample {index} of {type(self.dataset).__name__}", described(error), remedy) from error


class DatasetSamples(Samples):
    """The samples of a map-style data set, the `number`-th of `fetches`, which `workers` load; see `UserData`."""

    def __init__(self, fetches: Sequence[Fetch], number: int, workers: Workers, content: str):
        self.fetch, self._workers, self._content = fetches[number], workers, content
        self._load: Callable[[Any], Any] = partial(call_shared, number) if workers.count else fetches[number]
        self.num_workers = workers.count
        self.example = Batch(*self.fetch(Job([0], [0])))
        self.shape = tuple(self.example.inputs.shape[1:])
        of = self.fetch.dataset
        self.class_names = getattr(of, "classes", None) or getattr(getattr(of, "dataset", None), "classes", None)

    def __len__(self) -> int:
        return len(self.fetch.dataset)

    def batches(self, micros: Iterable[MicroBatch], seed: int, device: torch.device) -> Iterator[Batch]:
        return self._read((Job(*each) for each in SampleOrder(len(self), seed).with_seeds(micros)), device)

    def fake_batches(self, micros: Iterable[MicroBatch], device: torch.device) -> Iterator[Batch]:
        for micro in micros:
            n = micro.stop - micro.start
            yield Batch(*(each.new_zeros(n, *each.shape[1:]).to(device) for each in self.example))

    def in_order(self, batch_size: int, shard: tuple[int, int], device: torch.device) -> Iterator[Batch]:
        start, stop = shard_bounds(len(self), shard)
        ranges = [range(first, min(first + batch_size, stop)) for first in range(start, stop, batch_size)]
        return self._read((Job([*rows], [*rows]) for rows in ranges), device)

    def joined(self, other: Samples) -> Samples:
        assert isinstance(other, DatasetSamples)
        both = Fetch(ConcatDataset([self.fetch.dataset, other.fetch.dataset]))
        return DatasetSamples([both], 0, Workers(0), self._content)

    def fingerprint(self) -> str:
        return self._content

    def close(self) -> None:
        self._workers.close()

    def _read(self, jobs: Iterable[Job], device: torch.device) -> Iterator[Batch]:
        return (Batch(*tensors) for tensors in to_device(self._workers.map(self._load, jobs), device))
