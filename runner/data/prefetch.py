"""Asynchronous copies of batches to the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from contextlib import closing
from typing import Any

import torch

from runner.system.copy_stream import CopyStream, Tensors, Transfer


def to_device(batches: Generator[Tensors], device: torch.device, cuda: Any = None) -> Generator[Tensors]:
    """Yield `batches`, tuples of CPU tensors, after copying them to `device`; ready for use on the current stream.

    For a CUDA device, the next batch is copied on a separate stream while the model computes. `cuda` replaces
    `torch.cuda` in tests.
    """
    with closing(batches):
        if device.type != "cuda":
            for batch in batches:
                yield tuple(tensor.to(device) for tensor in batch)
            return
        stream = CopyStream(device, cuda or torch.cuda)
        pending: deque[Transfer] = deque()
        with closing(stream):
            for batch in batches:
                pending.append(stream.send(batch))
                if len(pending) > 1:
                    yield stream.receive(pending.popleft())
            while pending:
                yield stream.receive(pending.popleft())
