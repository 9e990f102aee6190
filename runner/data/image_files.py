"""Samples that do not fit into memory: image files that worker processes load during training."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch

from runner.batching import MicroBatch, SampleOrder
from runner.data.auto_augment import NO_AUGMENT, Augment
from runner.data.base import Batch, DataError, LabeledSamples, shard_bounds
from runner.data.normalization import normalized, per_channel
from runner.data.prefetch import to_device
from runner.data.workers import Loaders, Workers
from runner.seeds import sample_seeds, uniforms
from runner.system.utf8 import printable

log = logging.getLogger(__name__)

_MOST_NAMED = 20


class Reader(Protocol):
    """A function that reads one sample. It must be picklable, because it is sent to worker processes."""

    num_draws: int
    """Number of random numbers that the augmentation of one sample needs."""

    def __call__(self, path: str, draws: list[float] | None) -> torch.Tensor:
        """Return the sample at `path`, uint8 [channels, height, width].

        Args:
            path: path of the file.
            draws: `num_draws` uniform random numbers in [0, 1) for the augmentation; None for no augmentation.
        """
        ...


class Job(NamedTuple):
    """A description of a batch to load, as lists with one item for each sample."""

    indices: list[int]
    paths: list[str]
    targets: list[int]
    epochs: list[int] | None
    """The epoch of each sample, on which its augmentation depends; None for no augmentation."""


class Loaded(NamedTuple):
    """A loaded batch, and a list of its samples that could not be read.

    The main process replaces these samples in training, and leaves them out in evaluations.

    Args:
        job: the description of the batch.
        images: uint8 [n, channels, height, width].
        targets: class indices, int64 [n].
    """

    job: Job
    images: torch.Tensor
    targets: torch.Tensor
    failures: list[tuple[int, str]]
    """(row, error message) of each sample that could not be read. These rows of `images` are zero."""


@dataclass(frozen=True)
class Fetch:
    """A loader of batches for worker processes: `fetch[job]` loads the batch that `job` describes.

    Args:
        read: function that reads one sample.
        shape: (channels, height, width) of one image.
        seed: seed of the augmentation. The augmentation of a sample also depends on its index and the epoch.
        augment: further transforms of training images, applied to the images that `read` returns.
    """

    read: Reader
    shape: tuple[int, int, int]
    seed: int
    augment: Augment = NO_AUGMENT

    def __getitem__(self, job: Job) -> Loaded:
        images = torch.zeros(len(job.paths), *self.shape, dtype=torch.uint8)
        failures: list[tuple[int, str]] = []
        for row, (path, draws) in enumerate(zip(job.paths, self._draws(job), strict=True)):
            try:
                images[row] = self.read(path, draws)
                if self.augment and job.epochs is not None:
                    seed = sample_seeds(self.seed, torch.tensor(job.epochs[row]), torch.tensor([job.indices[row]]))
                    images[row] = self.augment(images[row : row + 1], seed)[0]
            except Exception as error:  # decoders may raise anything for a damaged file
                failures.append((row, printable(f"{type(error).__name__}: {error}")))
        return Loaded(job, images, torch.tensor(job.targets), failures)

    def _draws(self, job: Job) -> list[Any]:
        """Return a list with one item per sample: the random numbers for its augmentation; None for no augmentation.

        The random numbers are hashes of (seed, epoch, sample index), and are therefore the same in every process.
        """
        if job.epochs is None:
            return [None] * len(job.paths)
        return uniforms(self.seed, torch.tensor(job.epochs), torch.tensor(job.indices), self.read.num_draws).tolist()


class Unreadable:
    """A record of the files that could not be read so far.

    Args:
        skip: True to skip such files with a warning; False to raise an error for the first such file.
    """

    def __init__(self, skip: bool):
        self.skip = skip
        self.files: dict[str, str] = {}

    def add(self, path: str, why: str) -> None:
        """Record that a file could not be read, and log a warning if the file has not been recorded before.

        Args:
            path: path of the file.
            why: the reason, for the messages.

        Raises:
            DataError: if `skip` is False.
        """
        if not self.skip:
            raise DataError(printable(path), f"it cannot be read ({why})", "data.on_error=skip skips such files")
        if path not in self.files:
            self.files[path] = why
            log.warning("skipped %s: %s", printable(path), why)


class FileSamples(LabeledSamples):
    """Labeled images in files.

    Args:
        paths: the file of each sample.
        targets: the class index of each sample.
        class_names: the name of each class.
        shape: (channels, height, width) of one input.
        read: function that reads a file as an image of `shape`.
        mean: mean of each channel, for pixels in [0, 1]; it is subtracted from the inputs.
        std: standard deviation of each channel, for pixels in [0, 1]; the inputs are divided by it.
        workers: the processes that load batches.
        pin_memory: whether to load batches into page-locked memory; None to do so only for CUDA devices.
        unreadable: record of the files that cannot be read; may be shared with another `FileSamples`.
        augment: further transforms of training images, applied to the images that `read` returns.
        centre: side of the central square to which `read` crops images in evaluations, as a fraction of the image's
            shorter side. None if `read` does not crop images in this way; the method `image_input` then returns None.
        content: function that returns the `fingerprint` of the data set.
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
        augment: Augment = NO_AUGMENT,
        centre: float | None = None,
        content: Callable[[], str] = str,
    ):
        self.paths, self.targets, self.class_names = paths, targets, class_names
        self.num_classes = len(class_names)
        self.shape, self.read, self.mean, self.std = shape, read, mean, std
        self.num_workers = workers.count
        self.workers, self.pin_memory, self.unreadable, self.augment = workers, pin_memory, unreadable, augment
        self.centre, self._content = centre, content
        self._loaders = Loaders()

    def __len__(self) -> int:
        return len(self.paths)

    def batches(self, micros: Iterable[MicroBatch], seed: int, device: torch.device) -> Iterator[Batch]:
        order = SampleOrder(len(self), seed)
        fetch = Fetch(self.read, self.shape, seed, self.augment)
        jobs = (
            self._job(order.indices(m.start, m.stop).tolist(), order.epochs(m.start, m.stop).tolist()) for m in micros
        )

        if self.pin_memory and device.type != "cuda":  # here, as there may be many evaluations
            log.warning("data.pin_memory=true has no effect on device type %s", device.type)

        def load() -> Generator[tuple[torch.Tensor, torch.Tensor]]:
            for loaded in self._read(fetch, jobs, device):
                self._replace(fetch, loaded)
                yield loaded.images, loaded.targets

        return self._normalized(load(), device)

    def fake_batches(self, micros: Iterable[MicroBatch], device: torch.device) -> Iterator[Batch]:
        def load() -> Generator[tuple[torch.Tensor, torch.Tensor]]:
            for micro in micros:
                images = torch.zeros(micro.stop - micro.start, *self.shape, dtype=torch.uint8)
                yield images, torch.zeros(len(images), dtype=torch.int64)

        return self._normalized(load(), device)

    def in_order(self, batch_size: int, shard: tuple[int, int], device: torch.device) -> Iterator[Batch]:
        return (batch for _, batch in self.in_order_with_indices(batch_size, shard, device))

    def in_order_with_indices(
        self, batch_size: int, shard: tuple[int, int], device: torch.device
    ) -> Iterator[tuple[torch.Tensor, Batch]]:
        start, stop = shard_bounds(len(self), shard)
        starts = range(start, stop, batch_size)
        jobs = (self._job(list(range(first, min(first + batch_size, stop)))) for first in starts)

        def load() -> Generator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
            for loaded in self._read(Fetch(self.read, self.shape, 0), jobs, device, len(starts)):
                indices, images, targets = self._readable(loaded)
                if len(targets):
                    yield indices, images, targets
            # Other shards may have readable files.
            if shard[1] == 1 and len(self) and all(path in self.unreadable.files for path in self.paths):
                raise self._none_readable()

        mean, std = per_channel(self.mean, device), per_channel(self.std, device)
        for indices, images, targets in to_device(load(), device):
            yield indices, Batch(normalized(images, mean, std), targets)

    def display_images(self, indices: list[int]) -> torch.Tensor:
        return Fetch(self.read, self.shape, 0)[self._job(indices)].images

    def labels(self) -> torch.Tensor:
        return torch.tensor(self.targets)

    def image_input(self) -> dict[str, Any] | None:
        if self.centre is None:
            return None
        return {"shape": self.shape, "mean": self.mean, "std": self.std, "centre": self.centre}

    def fingerprint(self) -> str:
        return self._content()

    def extra_results(self, all_gather: Callable[[Any], list[Any]]) -> dict[str, Any]:
        for path, why in [found for files in all_gather(self.unreadable.files) for found in files.items()]:
            self.unreadable.add(path, why)
        files = [printable(path) for path in self.unreadable.files]
        return {"skipped_images": len(files), "skipped_files": files[:_MOST_NAMED]} if files else {}

    def close(self) -> None:
        self._loaders.close()

    def _read(
        self, fetch: Fetch, jobs: Iterable[Job], device: torch.device, max_workers: int = 256
    ) -> Iterator[Loaded]:
        """Load and yield the batch of each job, using at most `max_workers` workers."""
        pin = device.type == "cuda" and self.pin_memory is not False
        workers = replace(self.workers, count=min(max_workers, self.workers.count), pin_memory=pin)
        return self._loaders.read(fetch, workers, jobs)

    def _job(self, indices: list[int], epochs: list[int] | None = None) -> Job:
        return Job(indices, [self.paths[i] for i in indices], [self.targets[i] for i in indices], epochs)

    def _readable(self, loaded: Loaded) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return indices, images and targets of the samples that could be read, and record the unreadable files."""
        indices = torch.tensor(loaded.job.indices)
        if not loaded.failures:
            return indices, loaded.images, loaded.targets
        for row, why in loaded.failures:
            self.unreadable.add(loaded.job.paths[row], why)
        failed = {row for row, _ in loaded.failures}
        rows = [row for row in range(len(loaded.targets)) if row not in failed]
        return indices[rows], loaded.images[rows], loaded.targets[rows]

    def _replace(self, fetch: Fetch, loaded: Loaded) -> None:
        """Replace each unreadable sample in `loaded` with the next readable sample of the data set.

        Batches thus keep their size. Samples are replaced in the main process, because workers do not know all paths.
        """
        epochs = loaded.job.epochs
        assert epochs is not None
        for row, why in loaded.failures:
            self.unreadable.add(loaded.job.paths[row], why)
            index = loaded.job.indices[row]
            for other in ((index + step) % len(self) for step in range(1, len(self))):
                # Use the random numbers of the unreadable sample, because the replacement may be in this batch twice.
                replacement = fetch[Job([index], [self.paths[other]], [self.targets[other]], [epochs[row]])]
                if not replacement.failures:
                    loaded.images[row], loaded.targets[row] = replacement.images[0], replacement.targets[0]
                    break
                self.unreadable.add(self.paths[other], replacement.failures[0][1])
            else:
                raise self._none_readable()

    def _none_readable(self) -> DataError:
        path, why = next(iter(self.unreadable.files.items()))
        return DataError(
            f"{len(self)} files", "none of them can be read", f"check that they are images; {printable(path)}: {why}"
        )

    def _normalized(
        self, batches: Generator[tuple[torch.Tensor, torch.Tensor]], device: torch.device
    ) -> Iterator[Batch]:
        """Copy each batch to `device` as uint8 (a quarter of the size of float32), normalize it, and yield it."""
        mean, std = per_channel(self.mean, device), per_channel(self.std, device)
        for images, targets in to_device(batches, device):
            yield Batch(normalized(images, mean, std), targets)
