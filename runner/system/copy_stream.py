"""Copies to a CUDA device on a stream of their own, beside the one that computes; the host never waits for them.

https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-streams
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import torch

Tensors = tuple["torch.Tensor", ...]


class Transfer(NamedTuple):
    """Tensors that are being copied."""

    source: Tensors
    result: Tensors
    done: Any
    """The event after the last copy (`torch.cuda.Event`); None where nothing has to be copied."""


class NoCopy:
    """From a device to itself: there is nothing to copy."""

    def send(self, tensors: Tensors) -> Transfer:
        """Start copying `tensors`, once their device's current stream has computed them."""
        return Transfer(tensors, tensors, None)

    def receive(self, transfer: Transfer) -> Tensors:
        """The copies, to be used on the current stream of their device, which waits for them; the host does not."""
        return transfer.result

    def close(self) -> None:
        """Wait for the copies that are not done: the memory that they read must stay until then."""


class CopyStream(NoCopy):
    """From host memory to a CUDA device.

    Args:
        target: the device.
        cuda: stands in for `torch.cuda` in tests.
    """

    def __init__(self, target: torch.device, cuda: Any):
        self.target, self.cuda = target, cuda
        self.stream = cuda.Stream(target)
        self._pending: deque[Transfer] = deque()

    def send(self, tensors: Tensors) -> Transfer:
        while self._pending and self._pending[0].done.query():
            self._pending.popleft()
        with self.cuda.stream(self.stream):
            result = tuple(tensor.to(self.target, non_blocking=True) for tensor in tensors)
        transfer = Transfer(tensors, result, self.stream.record_event())
        self._pending.append(transfer)  # keeps the host memory until the copy is done
        return transfer

    def receive(self, transfer: Transfer) -> Tensors:
        current = self.cuda.current_stream(self.target)
        current.wait_event(transfer.done)
        for tensor in transfer.result:
            # Allocated on the copy stream: without this, its memory could be reused as soon as Python frees the
            # tensor, while the current stream has yet to read it.
            tensor.record_stream(current)
        return transfer.result

    def close(self) -> None:
        self.stream.synchronize()
        self._pending.clear()


class PeerCopyStream(CopyStream):
    """From one CUDA device to another.

    torch makes the current streams of both devices wait for a copy between them: side streams are made current for
    it, so that those that compute go on.
    """

    def __init__(self, source: torch.device, target: torch.device, cuda: Any):
        super().__init__(target, cuda)
        self.source, self.leaving = source, cuda.Stream(source)

    def send(self, tensors: Tensors) -> Transfer:
        self.leaving.wait_event(self.cuda.current_stream(self.source).record_event())  # the tensors are computed
        with self.cuda.stream(self.leaving), self.cuda.stream(self.stream):
            result = tuple(tensor.to(self.target, non_blocking=True) for tensor in tensors)
            done = self.stream.record_event()
        for tensor in tensors:  # allocated on the stream that computed them: see `receive`
            tensor.record_stream(self.leaving)
        return Transfer((), result, done)


def copy_stream(source: torch.device, target: torch.device, cuda: Any = None) -> NoCopy:
    """What copies tensors from one device of a process to another."""
    return NoCopy() if source == target else PeerCopyStream(source, target, cuda or torch.cuda)
