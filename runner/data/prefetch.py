"""Batches on their way to the device: the next one is copied while this one computes."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from contextlib import closing
from typing import Any, NamedTuple

import torch

Tensors = tuple["torch.Tensor", ...]


def to_device(batches: Generator[Tensors], device: torch.device, cuda: Any = None) -> Generator[Tensors]:
    """The same batches on `device`, each ready for the stream that is current when it is asked for.

    On CUDA the copy of the next batch is queued before a batch is handed out. Elsewhere there is nothing to overlap.

    Args:
        batches: tuples of tensors on the CPU. From page-locked memory they are copied without holding up the host.
        cuda: stands in for `torch.cuda` in tests.
    """
    with closing(batches):
        if device.type != "cuda":
            for batch in batches:
                yield tuple(tensor.to(device) for tensor in batch)
            return
        copier = Copier(device, cuda or torch.cuda)
        waiting: deque[Copy] = deque()
        with closing(copier):
            for batch in batches:
                waiting.append(copier.send(batch))
                if len(waiting) > 1:
                    yield copier.receive(waiting.popleft())
            while waiting:
                yield copier.receive(waiting.popleft())


class Copy(NamedTuple):
    """A batch on its way."""

    source: Tensors
    result: Tensors
    done: Any
    """The event after its last copy (`torch.cuda.Event`)."""


class Copier:
    """Copies batches to a CUDA device on a stream of its own, beside the one that computes."""

    def __init__(self, device: torch.device, cuda: Any):
        self.device, self.cuda = device, cuda
        self.stream = cuda.Stream(device)
        self._under_way: deque[Copy] = deque()

    def send(self, batch: Tensors) -> Copy:
        """Queue the copy of `batch`; its memory on the host is held until the copy is over."""
        while self._under_way and self._under_way[0].done.query():
            self._under_way.popleft()
        with self.cuda.stream(self.stream):
            result = tuple(tensor.to(self.device, non_blocking=True) for tensor in batch)
        copy = Copy(batch, result, self.stream.record_event())
        self._under_way.append(copy)
        return copy

    def receive(self, copy: Copy) -> Tensors:
        """The batch, to be used on the current stream, which waits for the copy; the host does not."""
        current = self.cuda.current_stream(self.device)
        current.wait_event(copy.done)
        for tensor in copy.result:
            # It belongs to the copying stream: without this, its memory could go to a later batch as soon as Python
            # lets go of it, while the computing stream has yet to read it.
            tensor.record_stream(current)
        return copy.result

    def close(self) -> None:
        """Wait for the copies under way: the memory that they read must not go away before."""
        self.stream.synchronize()
        self._under_way.clear()
