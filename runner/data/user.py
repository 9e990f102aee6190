"""Data sets of the user: `data=FILE.py:NAME`, or the argument `data` of `runner.train`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, Subset

from runner.batching import MicroBatch, SampleOrder
from runner.config import user_code
from runner.config.errors import ABSENT, check
from runner.config.limits import PositiveInt, Range
from runner.data.base import Data, Sampler, Samples, shard_bounds
from runner.data.fetch import Fetch, Job, UserSamples, item, sha256
from runner.data.forms import Arrays, class_names, data_set, is_pair, needing_double, singles, with_columns_of
from runner.data.generators import generators_of
from runner.data.image_files import to_device
from runner.data.memory import ArraySamples
from runner.data.stream import StreamSamples
from runner.data.stream_reader import Reader
from runner.data.workers import Workers, call_shared
from runner.seeds import derive
from runner.system.generators import seeded
from runner.system.trees import Tree, leaves_of

log = logging.getLogger(__name__)


@dataclass
class UserData(Data):
    """Training and held-out samples, or samples of which a share is held out; see `conf/data/_user.yaml`.

    They are two data sets, or one; or a function that returns them. A data set is a map-style `Dataset` or a list of
    samples, or arrays of all samples (see `forms`), or a stream, an `IterableDataset`. `collate`, of the user's file,
    makes a batch of a list of samples.
    """

    holdout: Annotated[float, Range(above=0, most=0.9)] = 0.2
    workers: Annotated[int, Range(least=0, most=256)] = 0
    prefetch: Annotated[int, Range(least=1, most=64)] = 2
    timeout: Annotated[float, Range(least=1, most=86400)] = 120
    eval_samples: PositiveInt | None = None
    sampler: Sampler = "uniform"

    may_change_on_resume: ClassVar[tuple[str, ...]] = ("workers", "prefetch", "timeout", "eval_samples")

    def load(self) -> tuple[Samples, Samples]:
        given: Any = user_code.find("data")
        remedy = "workload=FILE.py, which defines data, or data=FILE.py:NAME"
        check(given is not None, "", ABSENT, "no data is given", remedy)
        is_divided = not user_code.has_steps()
        with user_code.errors_of("data"), seeded(derive(0, "user data")):  # the same on all ranks, and for all seeds
            is_made = callable(given) and (isinstance(given, type) or not hasattr(given, "__getitem__"))
            made: Any = given() if is_made else given
            if is_pair(made, is_divided):
                sets = [data_set(each, is_divided) for each in (made[0], with_columns_of(*made))]
            else:
                sets = _split(data_set(made, is_divided), self.holdout, is_divided)
            streams = [isinstance(each, IterableDataset) for each in sets]
            self._check_streams(streams)
            collate = user_code.find("collate")
            why = "it is no function of a list of samples"
            check(collate is None or callable(collate), "collate", collate, why, "def collate(samples): …")
            if collate is None and all(type(each) is Arrays and each.is_divided for each in sets):
                needed = needing_double(each.inputs for each in sets)
                rounded = [(singles(each.inputs, needed), each.targets) for each in sets]
                content = sha256(rounded)
                both = [(each.inputs, each.targets) for each in sets] if self.keeps_double else rounded
                train, held_out = (ArraySamples(*each, content=content) for each in both)
            else:
                kinds = [Reader if is_stream else Fetch for is_stream in streams]
                fetches = [kind(each, collate, is_divided) for kind, each in zip(kinds, sets, strict=True)]
                workers = Workers(self.workers, self.timeout, self.prefetch, fetches)  # before anything is read
                batches = [batch for fetch in fetches for batch in fetch.some()]
                needed = needing_double(inputs for inputs, *_ in batches)
                content = sha256([(singles(inputs, needed), *rest) for inputs, *rest in batches])
                doubles = None if self.keeps_double else needed
                for fetch in fetches:
                    fetch.doubles = doubles
                name, why = type(sets[0]).__name__, "it is also the held-out stream, and cannot be copied"
                is_shared = sets[0] is sets[1] and isinstance(fetches[0], Reader) and not fetches[0].is_copied
                check(not is_shared, "", name, why, "pass two objects: (Stream(), Stream())")
                workers.attributes["doubles"] = doubles
                train, held_out = (
                    StreamSamples(each, number, workers, content, self.eval_samples)
                    if isinstance(each, Reader)
                    else DatasetSamples(each, number, workers, content)
                    for number, each in enumerate(fetches)
                )
                train.check_draws(False)
                held_out.check_draws(True)
                if not streams[0] and (count := len(generators_of(sets[0]))):
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

    def _check_streams(self, streams: list[bool]) -> None:
        why, remedy = "a stream is read in order, by one process", "data.workers=1, which reads it ahead"
        check(not any(streams) or self.workers <= 1, "workers", self.workers, why, remedy)
        why = "the held-out samples are no stream, and an evaluation takes all of them"
        is_used = self.eval_samples is None or any(streams)
        check(is_used, "eval_samples", self.eval_samples, why, "leave data.eval_samples=null")


def _split(given: Any, holdout: float, is_divided: bool) -> list[Any]:
    """Divide a data set at random, in a way that does not depend on the seed of a run."""
    why, remedy = "of a stream, which has no length, no share can be held out", "pass two: (stream, held-out data)"
    check(not isinstance(given, IterableDataset), "", type(given).__name__, why, remedy)
    count = len(given)
    check(count > 1, "", ABSENT, "a single sample cannot be divided", "pass training and held-out samples")
    order = torch.randperm(count, generator=torch.Generator().manual_seed(derive(0, "holdout")))
    num_held_out = max(1, round(holdout * count))
    parts = (sorted(rows.tolist()) for rows in (order[num_held_out:], order[:num_held_out]))
    return [data_set(Subset(given, rows), is_divided) for rows in parts]


def _in_words(shape: Tree) -> Any:
    return list(shape) if isinstance(shape, tuple) else shape


class Joined(Dataset):
    """The samples of two data sets, one after another."""

    def __init__(self, first: Any, second: Any):
        self.first, self.second = first, second

    def __len__(self) -> int:
        return len(self.first) + len(self.second)

    def __getitem__(self, index: int) -> Any:
        count = len(self.first)
        return item(self.first, index) if index < count else item(self.second, index - count)


class DatasetSamples(UserSamples):
    """The samples of a map-style data set, which `fetch` loads here or, as function `number`, in `workers`."""

    def __init__(self, fetch: Fetch, number: int, workers: Workers, content: str):
        self.fetch = fetch
        super().__init__(workers, content, fetch, self.fetch(Job([0], [0])))
        self._load: Callable[[Any], Any] = partial(call_shared, number) if workers.count else self.fetch

    def check_draws(self, held_out: bool) -> None:
        """Say it in a line if the first sample is another when it is read again with its seed.

        If samples are held out, also if it is another with another seed.
        """
        if sha256(self.fetch(Job([0], [0]))) != sha256(self.example):
            text = "data: sample 0 of %s is another each time that it is read, with the same seeds: workers may repeat "
            text += "its numbers, and a resume has others; draw from random, numpy.random, torch, or a generator in it"
            log.warning(text, type(self.fetch.dataset).__name__)
        elif held_out and sha256(self.fetch(Job([0], [1]))) != sha256(self.example):
            text = "data: held-out samples of %s draw random numbers, as an augmentation does, the same in each "
            text += "evaluation; pass training and held-out samples to leave it out"
            log.warning(text, type(self.fetch.dataset).__name__)

    def __len__(self) -> int:
        return len(self.fetch.dataset)

    def batches(self, micros: Iterable[MicroBatch], seed: int, device: torch.device) -> Iterator[Any]:
        order = SampleOrder(len(self), seed, weights=self.weights)
        return self._read((Job(*each) for each in order.with_seeds(micros)), device)

    def in_order(self, batch_size: int, shard: tuple[int, int], device: torch.device) -> Iterator[Any]:
        start, stop = shard_bounds(len(self), shard)
        ranges = [range(first, min(first + batch_size, stop)) for first in range(start, stop, batch_size)]
        return self._read((Job([*rows], [*rows]) for rows in ranges), device)

    def copied_values(self) -> dict[str, Any]:
        dataset, found = self.fetch.dataset if self._workers.count else None, dict[str, Any]()
        while dataset is not None:
            values = getattr(dataset, "__dict__", {}).items()
            name = type(dataset).__name__
            found |= {f"{name}.{key}": each for key, each in values if type(each) in (bool, int, float, str)}
            dataset = getattr(dataset, "dataset", None)
        return found

    def labels(self) -> torch.Tensor:
        dataset, rows = self.fetch.dataset, torch.arange(len(self))
        while type(dataset) is Subset:
            dataset, rows = dataset.dataset, torch.as_tensor(dataset.indices)[rows]
        targets = dataset.labels if isinstance(dataset, Arrays) else getattr(dataset, "targets", None)
        labels = torch.empty(0)
        if isinstance(targets, list | np.ndarray | torch.Tensor):
            with suppress(ValueError, TypeError):  # of names, for example
                labels = torch.as_tensor(targets)
        is_class = labels.dim() == 1 and len(labels) > int(rows.max()) and not labels.is_floating_point()
        return labels[rows].long() if is_class else super().labels()

    def joined(self, other: Samples) -> Samples:
        assert isinstance(other, DatasetSamples)
        both = Fetch(Joined(self.fetch.dataset, other.fetch.dataset), self.fetch.collate, self.fetch.is_divided)
        both.doubles = self.fetch.doubles
        return DatasetSamples(both, 0, Workers(0), self._content)

    def _read(self, jobs: Iterable[Job], device: torch.device) -> Iterator[Any]:
        return (self.form(*tensors) for tensors in to_device(self._workers.map(self._load, jobs), device))
