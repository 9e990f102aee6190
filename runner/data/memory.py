"""Samples that fit into memory: tensors on the device, gathered by index, with no worker and no copy a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from runner.batching import MicroBatch, SampleOrder
from runner.data.base import Batch, Samples, shard_bounds
from runner.seeds import uniforms


class TensorSamples(Samples):
    """Labelled images held as two tensors.

    Args:
        inputs: float32, normalised already, or uint8 (a quarter of the memory), normalised as batches are made;
            [n, channels, height, width].
        targets: int64 [n].
        mean: of each channel, in units of [0, 1]; what `inputs` were, or are to be, shifted by.
        std: of each channel; what they were, or are to be, divided by.
        flip: mirror half of the training images.
        crop: pixels that training images are shifted by at most, either way, with a black border.
    """

    def __init__(
        self,
        inputs: torch.Tensor,
        targets: torch.Tensor,
        class_names: list[str],
        mean: tuple[float, ...],
        std: tuple[float, ...],
        flip: bool = False,
        crop: int = 0,
    ):
        self.inputs, self.targets, self.class_names = inputs, targets, class_names
        self.num_classes = len(class_names)
        self.shape = (inputs.shape[1], inputs.shape[2], inputs.shape[3])
        self.mean, self.std, self.flip, self.crop = mean, std, flip, crop

    def __len__(self) -> int:
        return len(self.targets)

    def batches(self, micros: Iterable[MicroBatch], seed: int, device: torch.device) -> Iterator[Batch]:
        self._move(device)
        order = SampleOrder(len(self), seed, device)
        for micro in micros:
            indices = order.indices(micro.start, micro.stop)
            inputs = self._floats(self.inputs.index_select(0, indices))
            if self.flip or self.crop:
                epochs = order.epochs(micro.start, micro.stop)
                inputs = _shift_and_flip(inputs, uniforms(seed, epochs, indices, 3), self.crop, self.flip, self._black)
            yield Batch(inputs, self.targets.index_select(0, indices))

    def in_order(self, batch_size: int, shard: tuple[int, int], device: torch.device) -> Iterator[Batch]:
        self._move(device)
        start, stop = shard_bounds(len(self), shard)
        for first in range(start, stop, batch_size):
            last = min(first + batch_size, stop)
            yield Batch(self._floats(self.inputs[first:last]), self.targets[first:last])

    def display_images(self, indices: list[int]) -> torch.Tensor:
        images = self.inputs[torch.tensor(indices, device=self.inputs.device)].cpu()
        if images.dtype == torch.uint8:
            return images
        mean, std = (torch.tensor(values)[:, None, None] for values in (self.mean, self.std))
        return ((images * std + mean).clamp(0, 1) * 255).round().to(torch.uint8)

    def _move(self, device: torch.device) -> None:
        """Bring the samples to `device`, once."""
        if self.inputs.device != device:
            self.inputs, self.targets = self.inputs.to(device), self.targets.to(device)
        self._mean, self._std = (torch.tensor(v, device=device)[:, None, None] for v in (self.mean, self.std))
        self._black = -self._mean / self._std

    def _floats(self, images: torch.Tensor) -> torch.Tensor:
        if images.dtype != torch.uint8:
            return images
        return images.to(torch.float32).div_(255).sub_(self._mean).div_(self._std)


def _shift_and_flip(
    images: torch.Tensor, draws: torch.Tensor, crop: int, flip: bool, black: torch.Tensor
) -> torch.Tensor:
    """Each image shifted by whole pixels in [−crop, crop] both ways, and mirrored with probability one half.

    One gather for the whole batch, whatever its size: no Python a sample.

    Args:
        images: [n, channels, height, width].
        draws: uniform in [0, 1), [n, 3]: down, right, mirror.
        black: what comes in at the border, [channels, 1, 1].
    """
    n, channels, height, width = images.shape
    down, right = ((draws[:, i] * (2 * crop + 1)).long() - crop for i in (0, 1))
    rows = torch.arange(height, device=images.device) + down[:, None]  # [n, height]
    columns = torch.arange(width, device=images.device).expand(n, width)
    if flip:
        columns = torch.where(draws[:, 2:] < 0.5, width - 1 - columns, columns)
    columns = columns + right[:, None]
    inside = ((rows >= 0) & (rows < height))[:, None, :, None] & ((columns >= 0) & (columns < width))[:, None, None, :]
    places = rows.clamp(0, height - 1)[:, :, None] * width + columns.clamp(0, width - 1)[:, None, :]
    places = places.view(n, 1, height * width).expand(n, channels, height * width)
    moved = images.reshape(n, channels, height * width).gather(2, places).view_as(images)
    return torch.where(inside, moved, black)
