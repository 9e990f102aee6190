"""Blocks that compute their activations again in the backward pass instead of keeping them.

Chen et al., Training Deep Nets with Sublinear Memory Cost (2016). Between blocks the activations are kept, inside a
block they are dropped after the forward pass: memory for time (one more forward pass). The numbers are the same,
bitwise: dropout's random numbers and autocast are restored by `torch.utils.checkpoint`, and what it does not know of,
that batch normalisation would count and average every batch twice, is seen to here.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

Forward = TypeVar("Forward", bound=Callable[..., torch.Tensor])


def recomputable(forward: Forward) -> Forward:
    """A module's `forward`, run again in the backward pass where the module's `checkpoint_activations` says so.

    It stands inside the module, not around it, so that a piece of a network recomputes wherever it is run (in a
    pipeline too), and so that hooks on the module (those that gather sharded weights) fire once.
    """

    @functools.wraps(forward)
    def wrapped(block: Any, x: torch.Tensor) -> torch.Tensor:
        if not (block.checkpoint_activations and torch.is_grad_enabled()):
            return forward(block, x)
        if torch.compiler.is_compiling():  # a traced buffer is written once, and contexts cannot be traced
            return checkpoint(forward, block, x, use_reentrant=False)
        return checkpoint(forward, block, x, use_reentrant=False, context_fn=lambda: (nullcontext(), _Again(block)))

    return cast(Forward, wrapped)


class Block(nn.Sequential):
    """Layers that run one after the other: a piece between two places where a network can be cut.

    Args:
        checkpoint_activations: keep only the input for the backward pass, and compute the rest again.
        parts: the layers, by name. They may be another module's: a block made of those is a view of it.
    """

    def __init__(self, checkpoint_activations: bool, **parts: nn.Module):
        super().__init__(OrderedDict(parts))
        self.checkpoint_activations = checkpoint_activations

    forward = recomputable(nn.Sequential.forward)


class _Again:
    """The second forward pass of `block`: what batch normalisation notes of the batch goes to scratch tensors.

    Not `track_running_stats=False`, which changes what is saved for the backward pass, nor a momentum of zero, which
    makes NaN of infinity and leaves the count. A class, not a generator: a retained graph enters it more than once.
    """

    def __init__(self, block: nn.Module):
        self._block = block
        self._kept: list[tuple[nn.Module, str, torch.Tensor]] = []

    def __enter__(self) -> None:
        self._kept = [
            (module, name, buffer)
            for module in self._block.modules()
            if isinstance(module, _BatchNorm) and module.training  # in evaluation they are read, not written
            for name, buffer in module.named_buffers(recurse=False)
        ]
        for module, name, buffer in self._kept:
            setattr(module, name, torch.empty_like(buffer))

    def __exit__(self, *_: object) -> None:
        for module, name, buffer in self._kept:
            setattr(module, name, buffer)
        self._kept = []
