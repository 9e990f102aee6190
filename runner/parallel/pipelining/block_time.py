"""The measurement of the time that a block of a network takes; stages are chosen from the times of all blocks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from runner.device import synchronize

TimeBlock = Callable[["torch.nn.Module", "torch.Tensor", Callable[[], AbstractContextManager], bool], float]
"""A function with the arguments and the result of `measured_seconds`."""

_MIN_SECONDS, _MAX_REPEATS = 0.03, 20


def measured_seconds(
    block: torch.nn.Module, x: torch.Tensor, autocast: Callable[[], AbstractContextManager], requires_grad: bool
) -> float:
    """Return the median time of a forward and backward pass of `block` in seconds, after a warm-up.

    Args:
        block: the block.
        x: inputs of the block.
        autocast: function that returns a context manager for the forward pass.
        requires_grad: whether to compute the gradient of the inputs, too.
    """
    x = x.detach().clone().requires_grad_(requires_grad)
    times: list[float] = []
    while len(times) < 4 or (sum(times[1:]) < _MIN_SECONDS and len(times) < _MAX_REPEATS):
        synchronize(x.device)
        start = time.perf_counter()
        with autocast():
            output = block(x)
        if output.requires_grad:  # not that of a first block whose parameters are frozen
            output.backward(torch.ones_like(output))
        synchronize(x.device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])
