"""Asynchronous copies to a CUDA device on a separate stream, which overlap with computation.

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
    """Kept so that their memory is not freed too early; empty for a `PeerCopyStream`."""
    result: Tensors
    done: Any
    """A `torch.cuda.Event` that is recorded after the last copy; None if nothing has to be copied."""


class NoCopy:
    """The base class of copy streams, which copies nothing: source and target are the same device."""

    def send(self, tensors: Tensors) -> Transfer:
        """Queue copies of `tensors`, to be made once the source device's current stream has computed them."""
        return Transfer(tensors, tensors, None)

    def receive(self, transfer: Transfer) -> Tensors:
        """Return the copies. The target device's current stream waits until they are done; the host does not wait."""
        return transfer.result

    def close(self) -> None:
        """Wait until all copies are done. Afterwards, the memory of the source tensors may be freed."""


class CopyStream(NoCopy):
    """A stream for copies from host memory to the CUDA device `target`.

    The host waits for a copy if the memory is not pinned. `cuda` is `torch.cuda`, or a substitute in tests.
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
        self._pending.append(transfer)  # keeps the host memory alive until the copy is done
        return transfer

    def receive(self, transfer: Transfer) -> Tensors:
        current = self.cuda.current_stream(self.target)
        current.wait_event(transfer.done)
        for tensor in transfer.result:
            # The tensor was allocated on the copy stream. Without this call, its memory could be reused as soon as
            # Python frees it, even if the current stream has not read it yet.
            tensor.record_stream(current)
        return transfer.result

    def close(self) -> None:
        self.stream.synchronize()
        self._pending.clear()


class PeerCopyStream(CopyStream):
    """A stream for copies from one CUDA device to another.

    When torch copies a tensor between two devices, the current stream of each device waits for the copy. This class
    therefore makes two separate streams current during a copy, so that the streams used for computation do not wait.
    """

    def __init__(self, source: torch.device, target: torch.device, cuda: Any):
        super().__init__(target, cuda)
        self.source, self.source_stream = source, cuda.Stream(source)

    def send(self, tensors: Tensors) -> Transfer:
        self.source_stream.wait_event(self.cuda.current_stream(self.source).record_event())
        with self.cuda.stream(self.source_stream), self.cuda.stream(self.stream):
            result = tuple(tensor.to(self.target, non_blocking=True) for tensor in tensors)
            done = self.stream.record_event()
        for tensor in tensors:  # allocated on the stream that computed them: see `receive`
            tensor.record_stream(self.source_stream)
        return Transfer((), result, done)


def copy_stream(source: torch.device, target: torch.device, cuda: Any = None) -> NoCopy:
    """Return a stream for copies between two CUDA devices, which copies nothing if they are the same."""
    return NoCopy() if source == target else PeerCopyStream(source, target, cuda or torch.cuda)
