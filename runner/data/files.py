"""Samples too big for memory: files, read by worker processes as the batches come."""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch

from runner.batching import MicroBatch, SampleOrder
from runner.data.base import Batch, DataError, Samples, shard_bounds
from runner.data.prefetch import to_device
from runner.data.workers import Workers
from runner.seeds import uniforms

log = logging.getLogger(__name__)

_MOST_NAMED = 20


class Reader(Protocol):
    """Reads one sample; is sent to worker processes, so it must be picklable."""

    num_draws: int

    def __call__(self, path: str, draws: list[float] | None) -> torch.Tensor:
        """The sample at `path`, uint8 [channels, height, width].

        Args:
            draws: `num_draws` numbers in [0, 1) that decide its augmentation; None: not augmented.
        """
        ...


class Job(NamedTuple):
    """What one batch is to be made of."""

    indices: list[int]
    paths: list[str]
    targets: list[int]
    epochs: list[int] | None
    """The epoch of each sample in the shuffled stream; None: in order, not augmented."""


class Loaded(NamedTuple):
    """A batch as a worker hands it over. Failures are told, not raised: what to do about them is the run's to say."""

    job: Job
    images: torch.Tensor
    targets: torch.Tensor
    failures: list[tuple[int, str]]
    """Rows that could not be read, and why not."""


@dataclass(frozen=True)
class Fetch:
    """Makes batches of jobs, in a worker or in the run's process: the same."""

    read: Reader
    shape: tuple[int, int, int]
    seed: int

    def __getitem__(self, job: Job) -> Loaded:
        images = torch.zeros(len(job.paths), *self.shape, dtype=torch.uint8)
        failures: list[tuple[int, str]] = []
        for row, (path, draws) in enumerate(zip(job.paths, self._draws(job), strict=True)):
            try:
                images[row] = self.read(path, draws)
            except Exception as error:  # a decoder that is fed garbage may raise anything
                failures.append((row, f"{type(error).__name__}: {error}"))
        return Loaded(job, images, torch.tensor(job.targets), failures)

    def _draws(self, job: Job) -> list[Any]:
        """What decides each sample's augmentation: a hash of (seed, epoch, sample), whichever process asks."""
        if job.epochs is None:
            return [None] * len(job.paths)
        return uniforms(self.seed, torch.tensor(job.epochs), torch.tensor(job.indices), self.read.num_draws).tolist()


class Unreadable:
    """The files that could not be read up to now.

    Args:
        skip: go on without them; otherwise the first ends the run.
    """

    def __init__(self, skip: bool):
        self.skip = skip
        self.files: dict[str, str] = {}

    def add(self, path: str, why: str) -> None:
        """Take note of a file.

        Raises:
            DataError: when files are not to be skipped.
        """
        if not self.skip:
            raise DataError(path, f"it cannot be read ({why})", "data.on_error=skip goes on without such files")
        if path not in self.files:
            self.files[path] = why
            log.warning("skipped %s: %s", path, why)


class FileSamples(Samples):
    """Labelled images in files.

    Args:
        paths: of each sample.
        targets: the class of each sample.
        read: makes an image of `shape` of a path.
        mean: of each channel, in units of [0, 1]; what inputs are shifted by.
        std: of each channel; what they are divided by.
        pin_memory: batches in page-locked memory; None: where the device is a CUDA device.
        unreadable: where files that cannot be read are noted; may be shared with other samples.
    """

    def __init__(
        self,
        paths: list[str],
        targets: list[int],
        class_names: list[str],
        shape: tuple[int, int, int],
        read: Reader,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        workers: Workers,
        pin_memory: bool | None,
        unreadable: Unreadable,
    ):
        self.paths, self.targets, self.class_names = paths, targets, class_names
        self.num_classes = len(class_names)
        self.shape, self.read, self.mean, self.std = shape, read, mean, std
        self.workers, self.pin_memory, self.unreadable = workers, pin_memory, unreadable

    def __len__(self) -> int:
        return len(self.paths)

    def batches(self, micros: Iterable[MicroBatch], seed: int, device: torch.device) -> Iterator[Batch]:
        order = SampleOrder(len(self), seed)
        fetch = Fetch(self.read, self.shape, seed)
        jobs = (
            self._job(order.indices(m.start, m.stop).tolist(), order.epochs(m.start, m.stop).tolist()) for m in micros
        )

        def host() -> Generator[tuple[torch.Tensor, torch.Tensor]]:
            for loaded in self._read(fetch, jobs, device):
                self._replace(fetch, loaded)
                yield loaded.images, loaded.targets

        return self._normalized(host(), device)

    def in_order(self, batch_size: int, shard: tuple[int, int], device: torch.device) -> Iterator[Batch]:
        start, stop = shard_bounds(len(self), shard)
        starts = range(start, stop, batch_size)
        jobs = (self._job(list(range(first, min(first + batch_size, stop)))) for first in starts)

        def host() -> Generator[tuple[torch.Tensor, torch.Tensor]]:
            for loaded in self._read(Fetch(self.read, self.shape, 0), jobs, device, len(starts)):
                images, targets = self._readable(loaded)
                if len(targets):
                    yield images, targets
            if start < stop and all(path in self.unreadable.files for path in self.paths[start:stop]):
                raise self._none_readable()

        return self._normalized(host(), device)

    def display_images(self, indices: list[int]) -> torch.Tensor:
        if self.unreadable.files:  # `in_order` has left them out
            readable = [i for i, path in enumerate(self.paths) if path not in self.unreadable.files]
            indices = [readable[i] for i in indices]
        loaded = Fetch(self.read, self.shape, 0)[self._job(indices)]
        return self._readable(loaded)[0]

    def extra_results(self) -> dict[str, Any]:
        files = list(self.unreadable.files)
        return {"skipped_images": len(files), "skipped_files": files[:_MOST_NAMED]} if files else {}

    def _read(self, fetch: Fetch, jobs: Iterable[Job], device: torch.device, most: int = 256) -> Iterator[Loaded]:
        """The batches of `jobs`, from no more than `most` workers."""
        pin = device.type == "cuda" if self.pin_memory is None else self.pin_memory
        if pin and device.type != "cuda":
            log.warning("data.pin_memory=true does nothing for a %s", device.type)
        workers = replace(self.workers, count=min(most, self.workers.count), pin_memory=pin and device.type == "cuda")
        return workers.read(fetch, jobs)

    def _job(self, indices: list[int], epochs: list[int] | None = None) -> Job:
        return Job(indices, [self.paths[i] for i in indices], [self.targets[i] for i in indices], epochs)

    def _readable(self, loaded: Loaded) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows that could be read."""
        if not loaded.failures:
            return loaded.images, loaded.targets
        for row, why in loaded.failures:
            self.unreadable.add(loaded.job.paths[row], why)
        failed = {row for row, _ in loaded.failures}
        rows = [row for row in range(len(loaded.targets)) if row not in failed]
        return loaded.images[rows], loaded.targets[rows]

    def _replace(self, fetch: Fetch, loaded: Loaded) -> None:
        """Put the next readable sample in the place of each that is not: batches keep their size.

        Done here, not in the worker: the batch is the same whichever worker made it, and no worker needs all paths.
        """
        epochs = loaded.job.epochs
        assert epochs is not None
        for row, why in loaded.failures:
            self.unreadable.add(loaded.job.paths[row], why)
            index = loaded.job.indices[row]
            for other in ((index + step) % len(self) for step in range(1, len(self))):
                # Augmented as the lost one would have been: it may be in the batch once more, as itself.
                one = fetch[Job([index], [self.paths[other]], [self.targets[other]], [epochs[row]])]
                if not one.failures:
                    loaded.images[row], loaded.targets[row] = one.images[0], one.targets[0]
                    break
                self.unreadable.add(self.paths[other], one.failures[0][1])
            else:
                raise self._none_readable()

    def _none_readable(self) -> DataError:
        path, why = next(iter(self.unreadable.files.items()))
        return DataError(f"{len(self)} files", "none of them can be read", f"are these images? {path}: {why}")

    def _normalized(
        self, batches: Generator[tuple[torch.Tensor, torch.Tensor]], device: torch.device
    ) -> Iterator[Batch]:
        """The batches on the device, as floats: what travels are bytes, a quarter of them."""
        mean, std = (torch.tensor(values, device=device)[:, None, None] for values in (self.mean, self.std))
        for images, targets in to_device(batches, device):
            yield Batch(images.to(torch.float32).div_(255).sub_(mean).div_(std), targets)
