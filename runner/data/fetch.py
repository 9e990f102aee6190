"""Loads samples of data sets of the user, and makes batches of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.masked import is_masked_tensor
from torch.utils.data import Subset, default_collate

from runner.config import functions
from runner.config.errors import ABSENT, ConfigError, check, described
from runner.data.base import Batch, Collated, CollatedBatch, DataError, Samples, may_be_tokens, shape_of
from runner.data.forms import Arrays, pair, singles
from runner.data.generators import generators_of, seed_all
from runner.data.workers import Workers
from runner.system.generators import seed_host, seeded
from runner.system.trees import Tree, leaves_of, map_leaves, map_tensors, strided_parts, tensors_of

HASHED = 16
"""The number of samples of a data set that its fingerprint covers."""


class Job(NamedTuple):
    """A batch to load: the indices of its samples, and a seed for each."""

    indices: list[int]
    seeds: list[int]


class BatchMaker:
    """Makes batches of samples of the user: stacked, or collated as the user's file says.

    A batch is (inputs, targets) if it `is_divided`; otherwise, it has the structure of the samples, with their number.
    While samples are collated, `random`, NumPy, torch and the generators of the data set draw from a seed.
    """

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any] | None = None, is_divided: bool = True):
        self.dataset, self.collate, self.is_divided = dataset, collate, is_divided
        self.doubles: set[str] | None = None
        """The names of inputs that stay in float64; None for all of them."""
        self.form: Any = Collated if not is_divided else Batch if collate is None else CollatedBatch

    def _batch(self, samples: list[Any], numbers: Iterable[int], seed: int, generators: list[Any]) -> tuple[Any, ...]:
        """Return the parts of a `Batch` or `Collated`; messages call samples by `numbers`; collating uses `seed`."""
        if self.collate is not None:
            return self._collated(samples, seed, generators)
        name = type(self.dataset).__name__
        numbered = [*zip(numbers, samples, strict=True)]
        for index, sample in numbered:
            _check_unmasked(sample, name, f"sample {index}")
        try:
            inputs, targets = self._divided(default_collate(samples), "a batch", len(samples))
        except (ConfigError, KeyError, RuntimeError, TypeError) as error:
            for index, sample in numbered:
                self._divided(sample, f"sample {index}", 1)
            shapes = [shape for sample in samples for shape in sorted({*_shapes(sample)})]
            why = f"its samples cannot be stacked ({', '.join(dict.fromkeys(shapes))}): {error}"
            remedy = "let all samples have one shape and dtype, or define collate(samples) beside the data, which pads"
            if isinstance(error, TypeError):  # such as an image of PIL
                remedy = "return tensors, arrays or numbers, or define collate(samples) beside the data"
            raise DataError(name, why, remedy) from None
        both = (inputs, targets) if self.is_divided else inputs
        kinds = {type(leaf).__name__ for _, leaf in leaves_of(both) if not isinstance(leaf, torch.Tensor)}
        why = f"its inputs or targets are {' and '.join(sorted(kinds))}"
        remedy = "return tensors, arrays or numbers, or define collate(samples)"
        check(not kinds or not self.is_divided, "data", name, why, remedy)  # a step may use texts, such as paths
        return singles(inputs, self.doubles), targets

    def _divided(self, batch: Any, what: str, count: int) -> tuple[Tree, Any]:
        return pair(batch, what, type(self.dataset).__name__) if self.is_divided else (batch, count)

    def _collated(self, samples: list[Any], seed: int, generators: list[Any]) -> tuple[Any, ...]:
        seed_generators(seed, generators)
        assert self.collate is not None
        try:
            batch = self.collate(samples)
        except Exception as error:
            remedy = f"correct collate{functions.place(self.collate)}"
            raise DataError("collate", described(error), remedy) from error
        _check_unmasked(batch, "collate", "what it returns")
        inputs, targets = self._divided(batch, "what collate returns", len(samples))
        if self.is_divided:
            inputs, targets = map_leaves(_without_array, (inputs, targets))
        if not tensors_of(inputs):
            why = f"it returns no tensors{functions.place(self.collate)}"
            raise ConfigError("collate", ABSENT, why, "return tensors, of all samples in the list")
        parts = singles(inputs, self.doubles), targets
        return (*parts, len(samples)) if self.is_divided else parts


class Fetch(BatchMaker):
    """Loads batches of a map-style data set.

    While a sample is loaded, `random`, NumPy, torch and the generators of the data set draw from its seed; while
    samples are collated, from that of the first.
    """

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any] | None = None, is_divided: bool = True):
        super().__init__(dataset, collate, is_divided)
        while type(dataset) is Subset:
            dataset = dataset.dataset
        # Reading an item of a list draws nothing, and seeding the generators for it takes longer than reading it.
        self._may_draw = type(dataset) not in (list, tuple, Arrays)

    def __call__(self, job: Job) -> tuple[Any, ...]:
        with seeded(0):
            generators = generators_of(self.dataset)  # now, as the data set may have made some since the last batch
            pairs = zip(job.indices, job.seeds, strict=True)
            samples = [self._sample(index, seed, generators) for index, seed in pairs]
            return self._batch(samples, job.indices, job.seeds[0], generators)

    def some(self) -> list[tuple[Any, ...]]:
        """Return a batch of a few samples from the whole data set."""
        count = len(self.dataset)
        indices = [*range(0, count, -(-count // HASHED))]
        return [self(Job(indices, indices))]

    def _sample(self, index: int, seed: int, generators: list[Any]) -> Any:
        if self._may_draw:
            seed_generators(seed, generators)
        try:
            return item(self.dataset, index)
        except Exception as error:
            remedy = "correct its __getitem__"
            raise DataError(f"sample {index} of {type(self.dataset).__name__}", described(error), remedy) from error


def _check_unmasked(tree: Tree, name: str, what: str) -> None:
    """Refuse masked values, which would be replaced by what is below the mask, in `what` of the data set `name`."""
    for _, leaf in leaves_of(tree):
        if is_masked_tensor(leaf) or (isinstance(leaf, np.ma.MaskedArray) and np.ma.is_masked(leaf)):
            why = f"{what} has masked values, which would be replaced by what is below the mask"
            raise ConfigError("data", name, why, "replace them: array.filled(value), or tensor.to_tensor(value)")


def _without_array(leaf: Any) -> Any:
    return torch.as_tensor(leaf) if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc" else leaf


def seed_generators(seed: int, generators: list[Any]) -> None:
    """Let `random`, NumPy and torch on the CPU draw from `seed`, and each of `generators` from one derived from it."""
    seed_host(seed)
    seed_all(generators, seed)


def _shapes(sample: Any) -> Iterator[str]:
    for name, leaf in leaves_of(sample):
        yield f"{name} {list(leaf.shape) if hasattr(leaf, 'shape') else type(leaf).__name__}"


def item(dataset: Any, index: int) -> Any:
    """Return a sample as a `DataLoader` does, by `__getitems__` if there is one."""
    if not callable(several := getattr(dataset, "__getitems__", None)):
        return dataset[index]
    samples: Any = several([index])
    [sample] = samples
    return sample


class UserSamples(Samples):
    """Samples that `workers` load: `first` is a batch of the first one by `maker`, and `content` the fingerprint."""

    def __init__(self, workers: Workers, content: str, maker: BatchMaker, first: tuple[Any, ...]):
        self._workers, self._content, self.form = workers, content, maker.form
        self.example = self.form(*first)
        self.num_workers, self.shape = workers.count, shape_of(first[0])
        self.has_tokens = may_be_tokens(first[0])

    def fingerprint(self) -> str:
        return self._content

    def close(self) -> None:
        self._workers.close()


def zeros_like_batch(example: Tree, n: int) -> Tree:
    """Return zeros for n samples, in the form of a batch of one: its tensors have a row, or its lists an item, each."""
    if isinstance(example, Collated):
        return Collated(zeros_like_batch(example.batch, n), n)
    if isinstance(example, CollatedBatch):
        return CollatedBatch(zeros_like_batch(example.inputs, n), zeros_like_batch(example.targets, n), n)
    if isinstance(example, list) and len(example) == 1:
        return [map_tensors(torch.zeros_like, example[0]) for _ in range(n)]
    if isinstance(example, Mapping):
        return {name: zeros_like_batch(each, n) for name, each in example.items()}
    if isinstance(example, list | tuple):
        parts = [zeros_like_batch(each, n) for each in example]
        return type(example)(*parts) if hasattr(example, "_fields") else type(example)(parts)
    is_tensor = isinstance(example, torch.Tensor) and example.dim() > 0
    return example.new_zeros(n, *example.shape[1:]) if is_tensor else example


def sha256(tree: Tree) -> str:
    """Return a hash of all tensors in a tree."""
    digest = hashlib.sha256()
    for tensor in chain.from_iterable(map(strided_parts, tensors_of(tree))):
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
