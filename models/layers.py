"""What networks are made of: blocks that can recompute their activations, and batch normalization that is frozen.

Activation checkpointing (Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016) does not change a bit of the
results: `torch.utils.checkpoint` restores the random number generators and autocast, and this module prevents a second
update of the running statistics of batch normalization.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint


def recomputable(forward: Any) -> Any:
    """Decorate a module's method `forward` with activation checkpointing, if `module.checkpoint_activations` is True.

    The module itself is not wrapped, so that it behaves the same in any stage of a pipeline, and its hooks run once.
    """

    @functools.wraps(forward)
    def wrapped(block: Any, x: torch.Tensor) -> torch.Tensor:
        if not (block.checkpoint_activations and torch.is_grad_enabled()):
            return forward(block, x)
        if torch.compiler.is_compiling():  # context_fn cannot be traced; a traced buffer is written once anyway
            return checkpoint(forward, block, x, use_reentrant=False)
        return checkpoint(
            forward, block, x, use_reentrant=False, context_fn=lambda: (nullcontext(), _FrozenStatistics(block))
        )

    return wrapped


def make_recomputable(module: nn.Module) -> None:
    """Turn on activation checkpointing for `module`, whose class is replaced by a subclass with the same name."""
    cls = type(module)
    changed = {"forward": recomputable(cls.forward), "checkpoint_activations": True}
    module.__class__ = type(cls.__name__, (cls,), changed)


class Block(nn.Sequential):
    """A sequence of layers that stay together in one stage; one may share its parameters with another module."""

    def __init__(self, checkpoint_activations: bool, **layers: nn.Module):
        super().__init__(OrderedDict(layers))
        self.checkpoint_activations = checkpoint_activations

    forward = recomputable(nn.Sequential.forward)


class _FrozenStatistics:
    """A context manager in which the batch normalization layers of `block` update temporary buffers instead of theirs.

    `track_running_stats=False` would change which tensors are saved for the backward pass; a momentum of zero would
    make the statistics NaN if those of the batch are infinite (0·∞). If the graph is retained, it is entered
    repeatedly.
    """

    def __init__(self, block: nn.Module):
        self._block = block
        self._buffers: list[tuple[nn.Module, str, torch.Tensor]] = []

    def __enter__(self) -> None:
        self._buffers = [
            (module, name, buffer)
            for module in self._block.modules()
            if isinstance(module, _BatchNorm) and module.training  # in evaluation mode the buffers are not updated
            for name, buffer in module.named_buffers(recurse=False)
        ]
        for module, name, buffer in self._buffers:
            setattr(module, name, torch.empty_like(buffer))

    def __exit__(self, *_: object) -> None:
        for module, name, buffer in self._buffers:
            setattr(module, name, buffer)
        self._buffers = []


class FrozenStatistics(nn.Module):
    """The base class of a layer that stays in evaluation mode, in which batch normalization has fixed statistics.

    A layer is converted by setting its `__class__` to a subclass of its own (see `freeze_statistics`), so that it keeps
    its forward pass. Its submodules follow the mode of the network.
    """

    def train(self, mode: bool = True) -> FrozenStatistics:
        super().train(mode)
        self.training = False
        return self


def freeze_statistics(module: nn.Module) -> None:
    """Let all batch normalization in `module` normalize with its running statistics, which no longer change."""
    for layer in module.modules():
        if isinstance(layer, _BatchNorm) and layer.track_running_stats and not isinstance(layer, FrozenStatistics):
            layer.__class__ = type(type(layer).__name__, (FrozenStatistics, type(layer)), {})
            layer.training = False


def normalizes_batches(network: nn.Module) -> bool:
    """Return whether `network` has batch normalization with the statistics of the batches on which it is trained."""
    return any(isinstance(each, _BatchNorm) and not isinstance(each, FrozenStatistics) for each in network.modules())
