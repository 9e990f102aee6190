"""Data sets of any kind that fit into memory: a tensor with all inputs, and one with all targets."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator

import torch

from runner.batching import MicroBatch, SampleOrder
from runner.data.base import Batch, Samples, shard_bounds


class ArraySamples(Samples):
    """Samples in two tensors of any dtype, `inputs` [n, *shape] and `targets` [n, …], moved to the device when used."""

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
        for micro in micros:
            yield Batch(*self._training_samples(order, micro))

    def _training_samples(self, order: SampleOrder, micro: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        indices = order.indices(micro.start, micro.stop)
        return self.inputs.index_select(0, indices), self.targets.index_select(0, indices)

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
