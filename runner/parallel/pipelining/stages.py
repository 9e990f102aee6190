"""The stages of a split network: their modules, the activations between them, and which tensors belong to which."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import nn

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""The loss of a micro-batch, a scalar to be differentiated, from its outputs and targets."""


class ActivationSpec(NamedTuple):
    """What is passed from one stage to the next.

    Args:
        shape: of one sample's activations: (channels, height, width), or any other.
        dtype: of them.
        channels_last: they are in NHWC memory format.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    channels_last: bool = False

    @property
    def sent_shape(self) -> tuple[int, ...]:
        """The shape of one sample's activations as they are sent."""
        channels, *sides = self.shape
        return (*sides, channels) if self.is_permuted else self.shape

    @property
    def is_permuted(self) -> bool:
        """Whether they are sent as [n, height, width, channels], a contiguous view: no other tensor can be sent."""
        return self.channels_last and len(self.shape) == 3

    def empty(self, count: int, device: torch.device) -> torch.Tensor:
        """An uninitialised tensor for the activations of `count` samples, as they are sent."""
        return torch.empty(count, *self.sent_shape, dtype=self.dtype, device=device)


class StageModule(nn.Module):
    """Consecutive blocks of a network, which takes and returns activations as they are sent.

    Args:
        blocks: the network's own modules.
        inputs: the activations before it; None: it takes the batch's inputs.
        outputs: the activations after it; None: it returns the network's outputs.
        autocast: the context of a forward pass.
    """

    def __init__(
        self,
        blocks: Iterable[nn.Module],
        inputs: ActivationSpec | None,
        outputs: ActivationSpec | None,
        autocast: Callable[[], AbstractContextManager],
    ):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.inputs, self.outputs, self.autocast = inputs, outputs, autocast

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.inputs is not None:
            x = _FromSent.apply(x, self.inputs.is_permuted)  # pyright: ignore[reportAssignmentType]
        with self.autocast():
            for block in self.blocks:
                x = block(x)
        if self.outputs is not None:
            x = _ToSent.apply(x, self.outputs.is_permuted)  # pyright: ignore[reportAssignmentType]
        return x


class _FromSent(torch.autograd.Function):
    """Received activations as the blocks take them; their gradient as it is sent: contiguous."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, permuted: bool) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.permuted = permuted
        return x.permute(0, 3, 1, 2) if permuted else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return (gradient.permute(0, 2, 3, 1) if ctx.permuted else gradient).contiguous(), None


class _ToSent(torch.autograd.Function):
    """Activations as they are sent; a schedule may detach them in place."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, permuted: bool) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.permuted = permuted
        # .data, so that autograd does not take it for a view, which cannot be detached in place.
        return (x.permute(0, 2, 3, 1) if permuted else x).contiguous().data

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient.permute(0, 3, 1, 2) if ctx.permuted else gradient, None


def activation_specs(
    inputs: torch.Tensor, outputs: Sequence[ActivationSpec], bounds: Sequence[int]
) -> list[ActivationSpec]:
    """The activations before, between and after the stages.

    Args:
        inputs: of the network.
        outputs: of each block.
        bounds: the numbers of the blocks at which the stages begin and end: [0, …, num_blocks].
    """
    first = ActivationSpec(tuple(inputs.shape[1:]), inputs.dtype)
    *between, last = (outputs[stop - 1] for stop in bounds[1:])
    return [first, *between, last._replace(channels_last=False)]


def owners(model: nn.Module, stages: Sequence[Sequence[nn.Module]]) -> dict[str, int]:
    """The stage that each parameter and buffer of `model` belongs to, by name; those in no block, to the first.

    Raises:
        ValueError: naming a tensor that two stages share.
    """
    names = {id(tensor): name for name, tensor in _tensors(model)}
    owner = dict.fromkeys(names.values(), 0)
    taken: dict[int, int] = {}
    for number, blocks in enumerate(stages):
        for block in blocks:
            for tensor in (*block.parameters(), *block.buffers()):
                if taken.setdefault(id(tensor), number) != number:
                    raise ValueError(f"stages {taken[id(tensor)]} and {number} share {names[id(tensor)]}")
                owner[names[id(tensor)]] = number
    return owner


def keep_only(model: nn.Module, names: set[str]) -> None:
    """Remove all other parameters and buffers from `model`; those that stay keep their names."""
    for prefix, module in model.named_modules():
        for name, _ in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            if (f"{prefix}.{name}" if prefix else name) not in names:
                setattr(module, name, None)


def _tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]
