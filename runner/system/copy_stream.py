"""Asynchronous copies to an accelerator on a separate stream, which overlap with computation.

https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-streams
"""

from __future__ import annotations

from collections import deque
from operator import methodcaller
from typing import Any, NamedTuple

import torch

from runner.system.trees import Tree, map_tensors, tensors_of


class Transfer(NamedTuple):
    """A tree of tensors that are being copied."""

    source: Tree
    """Kept so that their memory is not freed too early; empty for a `PeerCopyStream`."""
    result: Tree
    done: Any
    """A `torch.Event` that is recorded after the last copy; None if nothing has to be copied."""


class NoCopy:
    """The base class of copy streams, which copies nothing: source and target are the same device."""

    def send(self, tensors: Tree) -> Transfer:
        """Queue copies of `tensors`, to be made once the source device's current stream has computed them."""
        return Transfer(tensors, tensors, None)

    def receive(self, transfer: Transfer) -> Tree:
        """Return the copies. The target device's current stream waits until they are done; the host does not wait."""
        return transfer.result

    def close(self) -> None:
        """Wait until all copies are done. Afterwards, the memory of the source tensors may be freed."""


class CopyStream(NoCopy):
    """A stream for copies from host memory to the accelerator `target`.

    The host waits for a copy if the memory is not pinned. `backend` is torch, or a substitute in tests.
    """

    def __init__(self, target: torch.device, backend: Any = torch):
        self.target, self.backend = target, backend
        self.stream = backend.Stream(target)
        self._copy = methodcaller("to", device=target, non_blocking=True)
        self._pending: deque[Transfer] = deque()

    def send(self, tensors: Tree) -> Transfer:
        while self._pending and self._pending[0].done.query():
            self._pending.popleft()
        with self.stream:
            result = map_tensors(self._copy, tensors)
        transfer = Transfer(tensors, result, self.stream.record_event())
        self._pending.append(transfer)  # keeps the host memory alive until the copy is done
        return transfer

    def receive(self, transfer: Transfer) -> Tree:
        current = self.backend.accelerator.current_stream(self.target)
        current.wait_event(transfer.done)
        for tensor in tensors_of(transfer.result):
            # The tensor was allocated on the copy stream. Without this call, its memory could be reused as soon as
            # Python frees it, even if the current stream has not read it yet.
            tensor.record_stream(current)
        return transfer.result

    def close(self) -> None:
        self.stream.synchronize()
        self._pending.clear()


class PeerCopyStream(CopyStream):
    """A stream for copies from one accelerator to another.

    When torch copies a tensor between two devices, the current stream of each device waits for the copy. This class
    therefore makes two separate streams current during a copy, so that the streams used for computation do not wait.
    """

    def __init__(self, source: torch.device, target: torch.device, backend: Any = torch):
        super().__init__(target, backend)
        self.source, self.source_stream = source, backend.Stream(source)

    def send(self, tensors: Tree) -> Transfer:
        self.source_stream.wait_event(self.backend.accelerator.current_stream(self.source).record_event())
        with self.source_stream, self.stream:
            result = map_tensors(self._copy, tensors)
            done = self.stream.record_event()
        for tensor in tensors_of(tensors):  # allocated on the stream that computed them: see `receive`
            tensor.record_stream(self.source_stream)
        return Transfer((), result, done)


def copy_stream(source: torch.device, target: torch.device, backend: Any = torch) -> NoCopy:
    """Return a stream for copies between two accelerators, which copies nothing if they are the same."""
    return NoCopy() if source == target else PeerCopyStream(source, target, backend)
