"""Pieces of a network: what each computes, how activations cross its borders, and who keeps which tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import nn


class Border(NamedTuple):
    """What crosses the border between two pieces.

    Args:
        shape: of one sample's activations: (channels, height, width), or any other.
        dtype: of them.
        channels_last: they lie in memory as [n, height, width, channels].
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    channels_last: bool = False

    @property
    def sent(self) -> tuple[int, ...]:
        """The shape of one sample's activations as they are sent."""
        channels, *sides = self.shape
        return (*sides, channels) if self.is_turned else self.shape

    @property
    def is_turned(self) -> bool:
        """Whether they are sent as [n, height, width, channels]: a view, where torch.distributed takes no other."""
        return self.channels_last and len(self.shape) == 3

    def empty(self, count: int, device: torch.device) -> torch.Tensor:
        """Room for the activations of `count` samples, as they are sent."""
        return torch.empty(count, *self.sent, dtype=self.dtype, device=device)


class Piece(nn.Module):
    """Consecutive blocks of a network, whose activations come in and go out as they are sent.

    Args:
        blocks: the network's own modules.
        enters: the border before it; None: it takes the batch's inputs.
        leaves: the border after it; None: it gives the network's outputs.
        autocast: the context of a forward pass.
    """

    def __init__(
        self,
        blocks: Iterable[nn.Module],
        enters: Border | None,
        leaves: Border | None,
        autocast: Callable[[], AbstractContextManager],
    ):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.enters, self.leaves, self.autocast = enters, leaves, autocast

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.enters is not None:
            x = _Entering.apply(x, self.enters.is_turned)  # pyright: ignore[reportAssignmentType]
        with self.autocast():
            for block in self.blocks:
                x = block(x)
        if self.leaves is not None:
            x = _Leaving.apply(x, self.leaves.is_turned)  # pyright: ignore[reportAssignmentType]
        return x


class _Entering(torch.autograd.Function):
    """Activations as blocks take them; their gradient as it is sent: contiguous."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, turned: bool) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.turned = turned
        return x.permute(0, 3, 1, 2) if turned else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return (gradient.permute(0, 2, 3, 1) if ctx.turned else gradient).contiguous(), None


class _Leaving(torch.autograd.Function):
    """Activations as they are sent; a schedule may detach them in place."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, turned: bool) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.turned = turned
        # .data, as it is no view in autograd's books: those may not be detached.
        return (x.permute(0, 2, 3, 1) if turned else x).contiguous().data

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient.permute(0, 3, 1, 2) if ctx.turned else gradient, None


def borders_of(inputs: torch.Tensor, outputs: Sequence[Border], cuts: Sequence[int]) -> list[Border]:
    """The borders before, between and after the pieces.

    Args:
        inputs: of the network.
        outputs: of each block.
        cuts: the numbers of blocks at which the pieces begin and end: [0, …, num_blocks].
    """
    return [Border(tuple(inputs.shape[1:]), inputs.dtype), *(outputs[stop - 1] for stop in cuts[1:])]


def owners(model: nn.Module, pieces: Sequence[Sequence[nn.Module]]) -> dict[str, int]:
    """The piece that each parameter and buffer of `model` belongs to, by name; the first has what is in none.

    Raises:
        ValueError: naming a tensor that two pieces share.
    """
    names = {id(tensor): name for name, tensor in _tensors(model)}
    owner = dict.fromkeys(names.values(), 0)
    taken: dict[int, int] = {}
    for number, blocks in enumerate(pieces):
        for block in blocks:
            for tensor in (*block.parameters(), *block.buffers()):
                if taken.setdefault(id(tensor), number) != number:
                    raise ValueError(f"stages {taken[id(tensor)]} and {number} share {names[id(tensor)]}")
                owner[names[id(tensor)]] = number
    return owner


def keep_only(model: nn.Module, names: set[str]) -> None:
    """Take all other parameters and buffers out of `model`; what stays keeps its name."""
    for prefix, module in model.named_modules():
        for name, _ in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            if (f"{prefix}.{name}" if prefix else name) not in names:
                setattr(module, name, None)


def _tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]
