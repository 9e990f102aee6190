"""Data sets of the user: `data=FILE.py:NAME`, or the argument `data` of `runner.train`."""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, Subset, default_collate

from runner.batching import MicroBatch, SampleOrder
from runner.config import user_code
from runner.config.errors import ABSENT, check, described
from runner.config.limits import Range
from runner.data.base import Batch, Data, DataError, Samples, shape_of, shard_bounds
from runner.data.forms import Arrays, class_names, is_pair, map_style, pair, single, with_columns_of
from runner.data.generators import generators_of, seed_all
from runner.data.image_files import to_device
from runner.data.memory import ArraySamples
from runner.data.workers import Workers, call_shared
from runner.seeds import derive, seeded
from runner.system.trees import Tree, leaves_of, map_tensors, tensors_of

log = logging.getLogger(__name__)

_HASHED = 16
"""The number of samples of a map-style data set that its fingerprint covers."""


@dataclass
class UserData(Data):
    """Training and held-out samples, or samples of which a share is held out; see `conf/data/_user.yaml`.

    They are two data sets, or one; or a function that returns them. A data set is a map-style `Dataset` or a list of
    samples, or arrays of all samples (see `forms`). `collate`, of the user's file, makes a batch of a list of samples.
    """

    holdout: Annotated[float, Range(above=0, most=0.9)] = 0.2
    workers: Annotated[int, Range(least=0, most=256)] = 0
    prefetch: Annotated[int, Range(least=1, most=64)] = 2
    timeout: Annotated[float, Range(least=1, most=86400)] = 120

    may_change_on_resume: ClassVar[tuple[str, ...]] = ("workers", "prefetch", "timeout")

    def load(self) -> tuple[Samples, Samples]:
        given: Any = user_code.find("data")
        remedy = "workload=FILE.py, which defines data, or data=FILE.py:NAME"
        check(given is not None, "", ABSENT, "no data is given", remedy)
        with user_code.errors_of("data"), seeded(derive(0, "user data")):  # the same on all ranks, and for all seeds
            is_made = callable(given) and (isinstance(given, type) or not hasattr(given, "__getitem__"))
            made: Any = given() if is_made else given
            if is_pair(made):
                sets = [map_style(made[0]), map_style(with_columns_of(*made))]
            else:
                sets = _split(map_style(made), self.holdout)
            collate = user_code.find("collate")
            why = "it is no function of a list of samples"
            check(collate is None or callable(collate), "collate", collate, why, "def collate(samples): …")
            if collate is None and all(type(each) is Arrays for each in sets):
                content = _sha256([each[:] for each in sets])
                train, held_out = (ArraySamples(each.inputs, each.targets, content=content) for each in sets)
            else:
                fetches = [Fetch(each, collate) for each in sets]
                some = [fetch.some() for fetch in fetches]
                content = _sha256(some)
                workers = Workers(self.workers, self.timeout, self.prefetch, fetches if self.workers else None)
                train, held_out = (DatasetSamples(fetches, number, workers, content) for number in range(2))
                train.check_draws(False)
                held_out.check_draws(True)
                if count := len(generators_of(sets[0])):
                    log.info("data: %d generators in the data set are seeded for each sample, by the run's seed", count)
            names = [class_names(each) for each in sets]
            train.class_names, held_out.class_names = names  # pyright: ignore[reportAttributeAccessIssue]
        why = f"a training input has the shape {_in_words(train.shape)}, a held-out one {_in_words(held_out.shape)}"
        is_same = train.shape == held_out.shape or collate is not None  # which may pad each batch to another length
        check(is_same, "", ABSENT, why, "let both data sets have inputs of one shape")
        first, second = names
        why = f"training samples have the classes {first}, held-out ones {second}: targets mean different classes"
        remedy = "let both have the same classes: ImageFolder(…, allow_empty=True) with an empty directory for a class"
        check(not first or second == first[: len(second)], "", ABSENT, why, remedy)
        for kind, samples in (("training", train), ("held-out", held_out)):
            parts = {"inputs": samples.inputs, "targets": samples.targets} if isinstance(samples, ArraySamples) else {}
            for name, values in leaves_of(parts):
                if wrong := int((~values.isfinite()).view(len(values), -1).any(1).sum()):
                    text = "data: %d of %d %s %s have values that are NaN or infinite"
                    log.warning(text, wrong, len(values), kind, name)
        return train, held_out


def _split(given: Any, holdout: float) -> list[Any]:
    """Divide a data set at random, in a way that does not depend on the seed of a run."""
    count = len(given)
    check(count > 1, "", ABSENT, "a single sample cannot be divided", "pass training and held-out samples")
    order = torch.randperm(count, generator=torch.Generator().manual_seed(derive(0, "holdout")))
    num_held_out = max(1, round(holdout * count))
    return [map_style(Subset(given, sorted(rows.tolist()))) for rows in (order[num_held_out:], order[:num_held_out])]


def _in_words(shape: Tree) -> Any:
    return list(shape) if isinstance(shape, tuple) else shape


def _sha256(tree: Tree) -> str:
    digest = hashlib.sha256()
    for tensor in tensors_of(tree):
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


class Job(NamedTuple):
    """A batch to load: the indices of its samples, and a seed for each."""

    indices: list[int]
    seeds: list[int]


class Fetch:
    """Loads batches of a map-style data set, as (inputs, targets); by default, samples are stacked.

    While a sample is loaded, `random`, NumPy, torch and the generators of the data set draw from its seed; while
    samples are collated, from that of the first.
    """

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any] | None = None):
        self.dataset, self.collate = dataset, collate

    def __call__(self, job: Job) -> tuple[Tree, Tree]:
        with seeded(0):
            generators = generators_of(self.dataset)  # now, as the data set may have made some since the last batch
            pairs = zip(job.indices, job.seeds, strict=True)
            samples = [self._sample(index, seed, generators) for index, seed in pairs]
            if self.collate is not None:
                return self._collated(samples, job.seeds[0], generators)
        name = type(self.dataset).__name__
        for index, sample in zip(job.indices, samples, strict=True):
            pair(sample, f"sample {index}", name)
            why = f"sample {index} has masked values, which would be replaced by what is below the mask"
            is_masked = any(np.ma.is_masked(leaf) for _, leaf in leaves_of(sample))
            check(not is_masked, "data", name, why, "replace them: array.filled(value)")
        try:
            inputs, targets = pair(default_collate(samples), "a batch", name)
        except (RuntimeError, TypeError) as error:
            shapes = [shape for sample in samples for shape in sorted({*_shapes(sample)})]
            why = f"its samples cannot be stacked ({', '.join(dict.fromkeys(shapes))}): {error}"
            remedy = "let all samples have one shape and dtype, or define collate(samples) beside the data, which pads"
            raise DataError(name, why, remedy) from None
        kinds = {type(leaf).__name__ for _, leaf in leaves_of((inputs, targets)) if not isinstance(leaf, torch.Tensor)}
        why = f"its inputs or targets are {' and '.join(sorted(kinds))}"
        check(not kinds, "data", name, why, "return tensors, arrays or numbers, or define collate(samples)")
        return map_tensors(single, inputs), targets

    def _collated(self, samples: list[Any], seed: int, generators: list[Any]) -> tuple[Tree, Tree]:
        _seed(seed, generators)
        assert self.collate is not None
        try:
            batch = self.collate(samples)
        except Exception as error:
            remedy = f"correct collate{user_code.place(self.collate)}; log.txt has the traceback"
            raise DataError("collate", described(error), remedy) from error
        inputs, targets = pair(batch, "what collate returns", type(self.dataset).__name__)
        why = f"it returns no tensors{user_code.place(self.collate)}"
        check(bool(tensors_of(inputs)), "collate", ABSENT, why, "return tensors, of all samples in the list")
        return map_tensors(single, inputs), targets

    def some(self) -> tuple[Tree, Tree]:
        """Return a few samples from the whole data set."""
        count = len(self.dataset)
        indices = [*range(0, count, -(-count // _HASHED))]
        return self(Job(indices, indices))

    def _sample(self, index: int, seed: int, generators: list[Any]) -> Any:
        _seed(seed, generators)
        try:
            return _item(self.dataset, index)
        except Exception as error:
            remedy = "correct its __getitem__; log.txt has the traceback"
            raise DataError(f"sample {index} of {type(self.dataset).__name__}", described(error), remedy) from error


def _seed(seed: int, generators: list[Any]) -> None:
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    seed_all(generators, seed)


def _shapes(sample: Any) -> Iterator[str]:
    for name, leaf in leaves_of(sample):
        yield f"{name} {list(leaf.shape) if hasattr(leaf, 'shape') else type(leaf).__name__}"


def _item(dataset: Any, index: int) -> Any:
    """Return a sample as a `DataLoader` does, by `__getitems__` if there is one."""
    if not callable(several := getattr(dataset, "__getitems__", None)):
        return dataset[index]
    samples: Any = several([index])
    [sample] = samples
    return sample


class Joined(Dataset):
    """The samples of two data sets, one after another."""

    def __init__(self, first: Any, second: Any):
        self.first, self.second = first, second

    def __len__(self) -> int:
        return len(self.first) + len(self.second)

    def __getitem__(self, index: int) -> Any:
        count = len(self.first)
        return _item(self.first, index) if index < count else _item(self.second, index - count)


class DatasetSamples(Samples):
    """The samples of a map-style data set, the `number`-th of `fetches`, which `workers` load; see `UserData`."""

    def __init__(self, fetches: Sequence[Fetch], number: int, workers: Workers, content: str):
        self.fetch, self._workers, self._content = fetches[number], workers, content
        self._load: Callable[[Any], Any] = partial(call_shared, number) if workers.count else fetches[number]
        self.num_workers = workers.count
        self.example = Batch(*self.fetch(Job([0], [0])))
        self.shape = shape_of(self.example.inputs)

    def check_draws(self, held_out: bool) -> None:
        """Say it in a line if the first sample is another when it is read again with its seed.

        If samples are held out, also if it is another with another seed.
        """
        if _sha256(self.fetch(Job([0], [0]))) != _sha256(self.example):
            text = "data: sample 0 of %s is another each time that it is read, with the same seeds: workers may repeat "
            text += "its numbers, and a resume has others; draw from random, numpy.random, torch, or a generator in it"
            log.warning(text, type(self.fetch.dataset).__name__)
        elif held_out and _sha256(self.fetch(Job([0], [1]))) != _sha256(self.example):
            text = (
                "data: held-out samples of %s draw random numbers, as an augmentation does, the same in each evaluation"
            )
            log.warning(
                f"{text}; pass training and held-out samples to leave it out", type(self.fetch.dataset).__name__
            )

    def __len__(self) -> int:
        return len(self.fetch.dataset)

    def batches(self, micros: Iterable[MicroBatch], seed: int, device: torch.device) -> Iterator[Batch]:
        return self._read((Job(*each) for each in SampleOrder(len(self), seed).with_seeds(micros)), device)

    def fake_batches(self, micros: Iterable[MicroBatch], device: torch.device) -> Iterator[Batch]:
        for micro in micros:
            n = micro.stop - micro.start
            yield map_tensors(lambda each: each.new_zeros(n, *each.shape[1:]).to(device), self.example)  # noqa: B023

    def in_order(self, batch_size: int, shard: tuple[int, int], device: torch.device) -> Iterator[Batch]:
        start, stop = shard_bounds(len(self), shard)
        ranges = [range(first, min(first + batch_size, stop)) for first in range(start, stop, batch_size)]
        return self._read((Job([*rows], [*rows]) for rows in ranges), device)

    def joined(self, other: Samples) -> Samples:
        assert isinstance(other, DatasetSamples)
        both = Fetch(Joined(self.fetch.dataset, other.fetch.dataset), self.fetch.collate)
        return DatasetSamples([both], 0, Workers(0), self._content)

    def fingerprint(self) -> str:
        return self._content

    def close(self) -> None:
        self._workers.close()

    def _read(self, jobs: Iterable[Job], device: torch.device) -> Iterator[Batch]:
        return (Batch(*tensors) for tensors in to_device(self._workers.map(self._load, jobs), device))
