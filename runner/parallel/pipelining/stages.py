"""The stages of a split network: their modules, the activations between them, and the tensors of each stage."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import nn

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""A function of the outputs and targets of a micro-batch that returns the scalar loss to differentiate."""


class ActivationSpec(NamedTuple):
    """The format of the activations that are passed from one stage to the next; `shape` is that of one sample."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    channels_last: bool = False

    @property
    def sent_shape(self) -> tuple[int, ...]:
        """The shape of one sample's activations in the format in which they are sent."""
        channels, *sides = self.shape
        return (*sides, channels) if self.is_permuted else self.shape

    @property
    def is_permuted(self) -> bool:
        """Whether activations are permuted to [n, height, width, channels], in which NHWC is contiguous, to be sent."""
        return self.channels_last and len(self.shape) == 3

    def empty(self, count: int, device: torch.device) -> torch.Tensor:
        """Return an uninitialized tensor for the activations of `count` samples, in the format for sending."""
        return torch.empty(count, *self.sent_shape, dtype=self.dtype, device=device)


class StageModule(nn.Module):
    """A module of consecutive blocks, whose inputs and outputs have the format in which activations are sent.

    `inputs` or `outputs` is None if the inputs or outputs are not sent, and need no conversion.
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
    """Conversion of received activations to the format of the blocks; the backward pass converts the gradient back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, permuted: bool) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.permuted = permuted
        return x.permute(0, 3, 1, 2) if permuted else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return (gradient.permute(0, 2, 3, 1) if ctx.permuted else gradient).contiguous(), None


class _ToSent(torch.autograd.Function):
    """Conversion of activations to the format in which they are sent; the backward pass converts the gradient back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, permuted: bool) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.permuted = permuted
        # .data, so that autograd does not treat it as a view, which cannot be detached in place.
        return (x.permute(0, 2, 3, 1) if permuted else x).contiguous().data

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient.permute(0, 3, 1, 2) if ctx.permuted else gradient, None


def keep_only(model: nn.Module, names: set[str]) -> None:
    """Remove every parameter and buffer of `model` that is not in `names`; the remaining tensors keep their names.

    If a tensor has several names, as tied weights have, only its first name is looked up in `names`.
    """
    kept = {id(tensor) for name, tensor in named_tensors(model) if name in names}
    for module in model.modules():
        for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            if id(tensor) not in kept:
                setattr(module, name, None)


def named_tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]
