"""Batches on the device: the next one is copied while this one computes."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from contextlib import closing
from typing import Any

import torch

from runner.system.copy_stream import CopyStream, Tensors, Transfer


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
        stream = CopyStream(device, cuda or torch.cuda)
        pending: deque[Transfer] = deque()
        with closing(stream):
            for batch in batches:
                pending.append(stream.send(batch))
                if len(pending) > 1:
                    yield stream.receive(pending.popleft())
            while pending:
                yield stream.receive(pending.popleft())
