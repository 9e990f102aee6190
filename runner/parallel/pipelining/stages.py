"""The modules of the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch

from runner.system.trees import Tree, call

Loss = Callable[[torch.Tensor, Tree], torch.Tensor]
"""A function of the outputs and targets of a micro-batch that returns the scalar loss to differentiate."""


class Blocks(torch.nn.Module):
    """A module of consecutive blocks, of which the first may take several inputs."""

    def __init__(self, blocks: Iterable[torch.nn.Module]):
        super().__init__()
        self.blocks = torch.nn.ModuleList(blocks)

    def forward(self, *inputs: Any, **options: Any) -> torch.Tensor:
        first, *others = self.blocks
        x = first(*inputs, **options)
        for block in others:
            x = block(x)
        return x


class StageModule(torch.nn.Module):
    """A stage, which takes and returns contiguous tensors if they are `received` or `sent`; the first takes a tree."""

    def __init__(
        self,
        blocks: Iterable[torch.nn.Module],
        received: bool,
        sent: bool,
        channels_last: bool,
        autocast: Callable[[], AbstractContextManager],
    ):
        super().__init__()
        self.blocks = Blocks(blocks)
        self.received, self.sent, self.channels_last, self.autocast = received, sent, channels_last, autocast

    def forward(self, x: Tree) -> torch.Tensor:
        if self.received:
            x = _Received.apply(x, self.channels_last and x.dim() == 4)
        with self.autocast():
            x = call(self.blocks, x)
        return _Sent.apply(x) if self.sent else x  # pyright: ignore[reportReturnType]


class _Received(torch.autograd.Function):
    """Conversion of received activations to the memory format of the blocks; their gradient is sent back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, channels_last: bool) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        # `data`: otherwise, autograd would treat it as a view, which the first block could not change in place.
        return x.contiguous(memory_format=torch.channels_last).data if channels_last else x.data

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _contiguous(gradient), None


class _Sent(torch.autograd.Function):
    """Conversion of activations to a contiguous tensor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _contiguous(x).data  # otherwise, autograd would treat it as a view, which cannot be detached in place

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient


def _contiguous(x: torch.Tensor) -> torch.Tensor:
    """Return `x` with the strides of a new tensor also in dimensions of size 1, which torch 2.11 compares, too."""
    return x.contiguous().flatten().view(x.shape)


def keep_only(model: torch.nn.Module, names: set[str]) -> None:
    """Remove all parameters and buffers of `model` but `names`, in which a tied weight has the first of its names."""
    kept = {id(tensor) for name, tensor in named_tensors(model) if name in names}
    for module in model.modules():
        for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            if id(tensor) not in kept:
                setattr(module, name, None)


def named_tensors(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]
