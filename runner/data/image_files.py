"""Samples that do not fit into memory: image files that worker processes load during training."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from runner.batching import MicroBatch, SampleOrder
from runner.data.augment import Transform
from runner.data.base import Batch, DataError, LabeledSamples, shard_bounds
from runner.data.decode import normalized, per_channel
from runner.data.workers import Workers
from runner.system.accelerator import has_streams
from runner.system.copy_stream import CopyStream, Transfer
from runner.system.secrets import printable
from runner.system.trees import Tree, map_tensors

log = logging.getLogger(__name__)

_MAX_NAMED = 20


class Job(NamedTuple):
    """A batch to load, as lists with one item for each sample; without `seeds`, samples are not augmented."""

    indices: list[int]
    paths: list[str]
    targets: list[int]
    seeds: list[int] | None


class Loaded(NamedTuple):
    """A loaded batch: images, uint8 [n, channels, height, width]."""

    job: Job
    images: torch.Tensor
    failures: list[tuple[int, str]]
    """(row, error message) of each sample that could not be read. These rows of `images` are zero."""


@dataclass(frozen=True)
class Fetch:
    """Loads batches in workers: images of `shape`, transformed by `augment`, if any, in training.

    `read`, a function of (path, whether for training), returns an image, uint8 [channels, height, width].
    """

    read: Callable[[str, bool], torch.Tensor]
    shape: tuple[int, int, int]
    augment: Transform | None = None

    def __call__(self, job: Job) -> Loaded:
        images = torch.zeros(len(job.paths), *self.shape, dtype=torch.uint8)
        failures: list[tuple[int, str]] = []
        with torch.random.fork_rng(devices=[]):
            for row, path in enumerate(job.paths):
                try:
                    if job.seeds is not None:
                        torch.default_generator.manual_seed(job.seeds[row])
                    image = self.read(path, job.seeds is not None)
                    images[row] = self.augment(image) if self.augment and job.seeds is not None else image
                except Exception as error:  # decoders may raise anything for a damaged file
                    failures.append((row, printable(f"{type(error).__name__}: {error}")))
        return Loaded(job, images, failures)


@dataclass(eq=False)
class FileSamples(LabeledSamples):
    """Labeled images in files, which `fetch` loads in `workers`; one file and one class index for each sample.

    `mean`, `std` and `center` are as in `ImageInput`. Batches are loaded into page-locked memory if `pin_memory`, or if
    it is None and the device has streams. `skipped`, which may be shared with another `FileSamples`, has the reasons
    why files could not be read; if it is None, the first one raises `DataError`. `content` returns the `fingerprint`.
    """

    paths: list[str]
    targets: list[int]
    class_names: list[str]
    fetch: Fetch
    mean: tuple[float, ...]
    std: tuple[float, ...]
    workers: Workers
    pin_memory: bool | None
    skipped: dict[str, str] | None
    center: float = 1.0
    content: Callable[[], str] = str

    def __post_init__(self) -> None:
        self.num_classes, self.shape = len(self.class_names), self.fetch.shape
        self.num_workers = self.workers.count

    def __len__(self) -> int:
        return len(self.paths)

    def batches(self, micros: Iterable[MicroBatch], seed: int, device: torch.device) -> Iterator[Batch]:
        jobs = (self._job(*each) for each in SampleOrder(len(self), seed, weights=self.weights).with_seeds(micros))
        if self.pin_memory and not has_streams(device):  # here, as there may be many evaluations
            log.warning("data.pin_memory=true has no effect on device type %s", device.type)

        def load() -> Generator[Tree]:
            for loaded in self.workers.map(self.fetch, jobs):
                self._replace(loaded)
                yield loaded.images, torch.tensor(loaded.job.targets)

        return (Batch(*tensors) for tensors in self._normalized(load(), device))

    @property
    def example(self) -> Batch:
        return Batch(torch.zeros(1, *self.shape), torch.zeros(1, dtype=torch.int64))

    def in_order(self, batch_size: int, shard: tuple[int, int], device: torch.device) -> Iterator[Batch]:
        return (batch for _, batch in self.in_order_with_indices(batch_size, shard, device))

    def in_order_with_indices(
        self, batch_size: int, shard: tuple[int, int], device: torch.device
    ) -> Iterator[tuple[torch.Tensor, Batch]]:
        start, stop = shard_bounds(len(self), shard)
        jobs = (self._job(range(first, min(first + batch_size, stop))) for first in range(start, stop, batch_size))

        def load() -> Generator[Tree]:
            for job, images, failures in self.workers.map(self.fetch, jobs):
                parts = images, torch.tensor(job.targets), torch.tensor(job.indices)
                for row, why in failures:
                    self._skip(job.paths[row], why)
                if rows := sorted({*range(len(images))}.difference(row for row, _ in failures)):
                    yield tuple(part[rows] for part in parts)

        for inputs, targets, indices in self._normalized(load(), device):
            yield indices, Batch(inputs, targets)

    def display_images(self, indices: list[int]) -> torch.Tensor:
        return self.fetch(self._job(indices)).images

    def labels(self) -> torch.Tensor:
        return torch.tensor(self.targets)

    def image_input(self) -> dict[str, Any] | None:
        return {"shape": self.shape, "mean": self.mean, "std": self.std, "center": self.center}

    def fingerprint(self) -> str:
        return self.content()

    def extra_results(self, all_gather: Callable[[Any], list[Any]]) -> dict[str, Any]:
        for path, why in [found for files in all_gather(self.skipped or {}) for found in files.items()]:
            self._skip(path, why)
        files = [printable(path) for path in self.skipped or ()]
        return {"skipped_images": len(files), "skipped_files": files[:_MAX_NAMED]} if files else {}

    def close(self) -> None:
        self.workers.close()

    def _job(self, indices: Sequence[int], seeds: list[int] | None = None) -> Job:
        return Job([*indices], [self.paths[i] for i in indices], [self.targets[i] for i in indices], seeds)

    def _replace(self, loaded: Loaded) -> None:
        """Replace each unreadable sample with the next readable one of the data set: batches keep their size."""
        seeds = loaded.job.seeds
        assert seeds is not None
        for row, why in loaded.failures:
            self._skip(loaded.job.paths[row], why)
            index = loaded.job.indices[row]
            for other in ((index + step) % len(self) for step in range(1, len(self))):
                # Use the seed of the unreadable sample, because the replacement may be in this batch twice.
                replacement = self.fetch(self._job([other], [seeds[row]]))
                if not replacement.failures:
                    loaded.images[row], loaded.job.targets[row] = replacement.images[0], self.targets[other]
                    break
                self._skip(self.paths[other], replacement.failures[0][1])
            else:
                raise DataError(f"{len(self)} files", "none of them can be read", "check that they are images")

    def _skip(self, path: str, why: str) -> None:
        if self.skipped is None:
            raise DataError(printable(path), f"it cannot be read ({why})", "data.on_error=skip skips such files")
        if path not in self.skipped:
            self.skipped[path] = why
            log.warning("skipped %s: %s", printable(path), why)

    def _normalized(self, batches: Generator[Tree], device: torch.device) -> Iterator[Tree]:
        """Copy each batch to `device` as uint8, a quarter of the size of float32, and normalize its images."""
        mean, std = per_channel(self.mean, device), per_channel(self.std, device)
        for images, *others in to_device(batches, device, self.pin_memory is not False):
            yield normalized(images, mean, std), *others


def to_device(
    batches: Generator[Tree], device: torch.device, pin_memory: bool = False, backend: Any = None
) -> Generator[Tree]:
    """Yield `batches`, trees of CPU tensors, after copying them to `device`; ready for use on the current stream.

    For a device with streams, the next batch is copied on a separate one while the model computes, from page-locked
    memory if `pin_memory`. `backend` replaces torch in tests.
    """
    with closing(batches):
        if backend is None and not has_streams(device):
            for batch in batches:
                yield map_tensors(partial(torch.Tensor.to, device=device), batch)
            return
        stream = CopyStream(device, backend or torch)
        pending: deque[Transfer] = deque()
        with closing(stream):
            for batch in batches:
                pending.append(stream.send(map_tensors(torch.Tensor.pin_memory, batch) if pin_memory else batch))
                if len(pending) > 1:
                    yield stream.receive(pending.popleft())
            while pending:
                yield stream.receive(pending.popleft())
