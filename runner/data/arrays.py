"""Data sets of any kind that fit into memory: a tensor with all inputs, and one with all targets."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator

import torch

from runner.batching import MicroBatch, SampleOrder
from runner.data.base import Batch, Samples, shard_bounds

_GROUP_BYTES = 1 << 18
_ALIGNMENT = 64  # bytes; new tensors on a CPU begin at a multiple of it


class ArraySamples(Samples):
    """Samples in two tensors: sample i has the input `inputs[i]` and the target `targets[i]`.

    Inputs may be rows of a table, for example, or sequences that all have the same length; no dtype is converted. At
    first use, the tensors are moved to the device of the batches. On small tensors, an operation takes longer to start
    than to compute: one operation takes the samples of several micro-batches, up to 256 KiB, and each is a view.

    Args:
        inputs: any dtype, [n, *shape].
        targets: any dtype, [n, …].

    Raises:
        ValueError: if the two tensors have different numbers of samples.
    """

    def __init__(self, inputs: torch.Tensor, targets: torch.Tensor):
        if len(inputs) != len(targets):
            raise ValueError(f"there are {len(inputs)} inputs {list(inputs.shape)}, and {len(targets)} targets")
        self.inputs, self.targets = inputs, targets
        self.shape = tuple(inputs.shape[1:])

    def __len__(self) -> int:
        return len(self.targets)

    def batches(self, micros: Iterable[MicroBatch], seed: int, device: torch.device) -> Iterator[Batch]:
        self._move(device)
        order = SampleOrder(len(self), seed, device)
        for group in self._groups(micros):
            inputs, targets = self._training_samples(order, group)
            sizes = [micro.stop - micro.start for micro in group]
            yield from map(Batch, inputs.split_with_sizes(sizes), targets.split_with_sizes(sizes))

    def _training_samples(self, order: SampleOrder, micros: list[MicroBatch]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the inputs and the targets of the samples of all `micros`, one micro-batch after another."""
        indices = order.indices_of(micros)
        return self.inputs.index_select(0, indices), self.targets.index_select(0, indices)

    def _input_bytes(self) -> int:
        return math.prod(self.shape) * self.inputs.element_size()

    def _groups(self, micros: Iterable[MicroBatch]) -> Iterator[list[MicroBatch]]:
        """Divide `micros` into groups of successive micro-batches whose samples are taken together.

        A micro-batch is alone in its group if its size in bytes is not a multiple of the alignment of new tensors.
        Otherwise, the alignment of its tensors would depend on its place in the group, which is different after the
        run was resumed, and matrix products may round differently if the alignment differs.
        """
        input_bytes, target_bytes = self._input_bytes(), math.prod(self.targets.shape[1:]) * self.targets.element_size()
        group: list[MicroBatch] = []
        group_bytes = 0
        for micro in micros:
            count = micro.stop - micro.start
            aligned = count * input_bytes % _ALIGNMENT == 0 and count * target_bytes % _ALIGNMENT == 0
            micro_bytes = count * (input_bytes + target_bytes)
            if group and (not aligned or group_bytes + micro_bytes > _GROUP_BYTES):
                yield group
                group, group_bytes = [], 0
            group.append(micro)
            group_bytes += micro_bytes if aligned else _GROUP_BYTES
        if group:
            yield group

    def in_order(self, batch_size: int, shard: tuple[int, int], device: torch.device) -> Iterator[Batch]:
        self._move(device)
        start, stop = shard_bounds(len(self), shard)
        for first in range(start, stop, batch_size):
            last = min(first + batch_size, stop)
            yield Batch(self.inputs[first:last], self.targets[first:last])

    def joined(self, other: Samples) -> Samples:
        if type(other) is not type(self):
            return super().joined(other)
        both = copy.copy(self)
        both.inputs, both.targets = (torch.cat(pair) for pair in zip(self._tensors(), other._tensors(), strict=True))
        return both

    def _tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs, self.targets

    def _move(self, device: torch.device) -> None:
        self.inputs, self.targets = self.inputs.to(device), self.targets.to(device)
