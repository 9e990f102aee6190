"""Samples that fit into memory: tensors on the device, from which batches are taken by indexing."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch

from runner.batching import MicroBatch, SampleOrder
from runner.data.augment import Transform
from runner.data.base import Batch, LabeledSamples, Samples, copied, may_be_tokens, shape_of, shard_bounds
from runner.data.decode import normalized, per_channel
from runner.seeds import sample_seeds, uniforms
from runner.system.trees import Tree, map_leaves, map_tensors, rows_of, tensors_of


@dataclass(eq=False, repr=False)
class ArraySamples(Samples):
    """Samples in tensors of any dtype, `inputs` [n, *shape] and `targets` [n, …], moved to the device when used.

    Each is a tensor or a tree of them.

    `content` is the `fingerprint`.
    """

    numbers_at_once: ClassVar[int] = 1 << 16
    """So many numbers are prepared at once: the calls for a small micro-batch take longer than its step."""

    inputs: Tree
    targets: Tree
    content: str = field(default="", kw_only=True)

    def __post_init__(self) -> None:
        lengths = {len(tensor) for tensor in tensors_of((self.inputs, self.targets))}
        if len(lengths) != 1:
            raise ValueError(f"the inputs and targets have different lengths: {', '.join(map(str, sorted(lengths)))}")
        [self._length] = lengths
        self.shape, self.has_tokens = shape_of(self.inputs), may_be_tokens(self.inputs)

    def __len__(self) -> int:
        return self._length

    def batches(self, micros: Iterable[MicroBatch], seed: int, device: torch.device) -> Iterator[Batch]:
        self._move(device)
        order = SampleOrder(len(self), seed, device, self.weights)
        most = self.numbers_at_once // max(1, sum(each[0].numel() for each in tensors_of(self._parts())))
        for group in _groups(micros, most):
            bounds = _ranges(group)
            parts = [order.indices(*each) for each in bounds]
            indices, epochs = _joined(parts), _joined([order.epochs(*each) for each in bounds])
            draws = _joined([order.draws(*each, part) for each, part in zip(bounds, parts, strict=True)])
            take = partial(torch.Tensor.index_select, dim=0, index=indices)
            inputs, targets = map_tensors(take, self._parts())
            inputs = self._augmented(self._normalized(inputs), seed, epochs, draws)  # the first ones take memory
            batch = Batch(inputs, targets)
            if len(group) == 1:
                yield batch
                continue
            ends = [*itertools.accumulate(micro.stop - micro.start for micro in group)]
            for first, last in zip([0, *ends], ends, strict=False):
                yield copied(rows_of(batch, first, last))  # in memory of its own, aligned as if it were alone

    def in_order(self, batch_size: int, shard: tuple[int, int], device: torch.device) -> Iterator[Batch]:
        self._move(device)
        start, stop = shard_bounds(len(self), shard)
        for first in range(start, stop, batch_size):
            last = min(first + batch_size, stop)
            inputs, targets = copied(rows_of(self._parts(), first, last))
            yield Batch(self._normalized(inputs), targets)

    def fingerprint(self) -> str:
        return self.content

    def labels(self) -> torch.Tensor:
        targets = self.targets
        is_class = isinstance(targets, torch.Tensor) and targets.dim() == 1 and not targets.is_floating_point()
        return targets.cpu().long() if is_class else super().labels()

    def joined(self, other: Samples) -> Samples:
        if type(other) is not type(self):
            return super().joined(other)
        for each in (self, other):
            each._move(torch.device("cpu"))
        both = copy.copy(self)
        both.inputs, both.targets = map_leaves(lambda *each: torch.cat(each), self._parts(), other._parts())
        both._length = len(self) + len(other)
        return both

    def _parts(self) -> tuple[Tree, Tree]:
        return self.inputs, self.targets

    def _move(self, device: torch.device) -> None:
        self.inputs, self.targets = map_tensors(lambda each: each.to(device), self._parts())

    def _normalized(self, inputs: Tree) -> Tree:
        return inputs

    def _augmented(self, inputs: Tree, seed: int, epochs: torch.Tensor, draws: torch.Tensor) -> Tree:
        return inputs


def _groups(micros: Iterable[MicroBatch], most: int) -> Iterator[list[MicroBatch]]:
    """Yield `micros` in groups of at most `most` samples, but of one at least.

    The first group is one micro-batch, and each has at most twice as many as the one before: a run of few steps, of
    which a proof has several, prepares few that it does not need.
    """
    group, count, longest = list[MicroBatch](), 0, 1
    for micro in micros:
        size = micro.stop - micro.start
        if group and count + size > most:
            yield group
            group, count = [], 0
        group.append(micro)
        count += size
        if len(group) == longest or count + size > most:  # without asking for the next
            yield group
            group, count, longest = [], 0, 2 * longest
    if group:
        yield group


def _ranges(group: list[MicroBatch]) -> list[tuple[int, int]]:
    """Return the positions in the stream of samples of `group`; those that follow one another are one range."""
    ranges = [(group[0].start, group[0].stop)]
    for micro in group[1:]:
        start, stop = ranges[-1]
        ranges[-1:] = [(start, micro.stop)] if micro.start == stop else [(start, stop), (micro.start, micro.stop)]
    return ranges


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


@dataclass(eq=False, repr=False)
class TensorSamples(ArraySamples, LabeledSamples):
    """Labeled images in two tensors.

    The `inputs` are [n, channels, height, width], float32 and normalized; or uint8, which are normalized batch by
    batch. The `targets` are class indices, int64 [n]. `mean` and `std`, of each channel, are those of pixels in [0, 1].

    Training images are mirrored horizontally with probability 1/2 if `flip`, and shifted by up to `crop` pixels in each
    direction, with a black border; `augment` is a further transform, of one image at a time.
    """

    class_names: list[str]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    flip: bool = False
    crop: int = 0
    augment: Transform | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.num_classes = len(self.class_names)

    def _augmented(self, inputs: torch.Tensor, seed: int, epochs: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
        if not (self.flip or self.crop or self.augment):
            return inputs
        if self.flip or self.crop:
            inputs = _shift_and_flip(inputs, uniforms(seed, epochs, draws, 3), self.crop, self.flip, self._black)
        if self.augment:
            pixels, seeds = _pixels(inputs, self._mean, self._std), sample_seeds(seed, epochs, draws)
            with torch.random.fork_rng(devices=[]):
                for image, sample_seed in zip(pixels, seeds, strict=True):
                    torch.default_generator.manual_seed(sample_seed)
                    image.copy_(self.augment(image))
            inputs = self._normalized(pixels)
        return inputs

    def display_images(self, indices: list[int]) -> torch.Tensor:
        images = self.inputs[torch.tensor(indices, device=self.inputs.device)].cpu()
        if images.dtype == torch.uint8:
            return images
        return _pixels(images, per_channel(self.mean), per_channel(self.std))

    def image_input(self) -> dict[str, Any] | None:
        channels, height, width = self.shape
        if channels not in (1, 3) or height != width:
            return None
        return {"shape": self.shape, "mean": self.mean, "std": self.std, "center": 1.0}

    def _move(self, device: torch.device) -> None:
        super()._move(device)
        self._mean, self._std = per_channel(self.mean, device), per_channel(self.std, device)
        self._black = -self._mean / self._std

    def _normalized(self, inputs: torch.Tensor) -> torch.Tensor:
        return normalized(inputs, self._mean, self._std) if inputs.dtype == torch.uint8 else inputs


def _pixels(images: torch.Tensor, mean: torch.Tensor, std: torch.Tensor) -> torch.Tensor:
    """Undo the normalization of `images`, and return them as uint8, clamped to the range of pixels."""
    return ((images * std + mean).clamp(0, 1) * 255).round().to(torch.uint8)


def _shift_and_flip(
    images: torch.Tensor, draws: torch.Tensor, crop: int, flip: bool, black: torch.Tensor
) -> torch.Tensor:
    """Shift and mirror a batch by the random numbers `draws`, [n, 3], with borders in the color `black`.

    One gather operation: torchvision's `RandomCrop`, image by image, would take longer than a step of a small network.
    """
    n, channels, height, width = images.shape
    down, right = ((draws[:, i] * (2 * crop + 1)).long() - crop for i in (0, 1))
    rows = torch.arange(height, device=images.device) + down[:, None]  # [n, height]
    columns = torch.arange(width, device=images.device).expand(n, width)
    if flip:
        columns = torch.where(draws[:, 2:] < 0.5, width - 1 - columns, columns)
    columns = columns + right[:, None]
    inside = ((rows >= 0) & (rows < height))[:, None, :, None] & ((columns >= 0) & (columns < width))[:, None, None, :]
    positions = rows.clamp(0, height - 1)[:, :, None] * width + columns.clamp(0, width - 1)[:, None, :]
    positions = positions.view(n, 1, height * width).expand(n, channels, height * width)
    moved = images.reshape(n, channels, height * width).gather(2, positions).view_as(images)
    return torch.where(inside, moved, black)
