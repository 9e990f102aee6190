"""A small convolutional classifier similar to LeNet-5 (LeCun et al., 1998)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from models.recompute import Block


class ConvNet(nn.Sequential):
    """Convolutions, each followed by ReLU and 2×2 max pooling, then two linear layers.

    Args:
        in_channels: number of channels of the inputs [n, in_channels, height, width].
        height: height of the inputs in pixels.
        width: width of the inputs in pixels.
        num_classes: number of outputs.
        channels: number of output channels of each convolution.
        kernel_size: kernel size of each convolution.
        padding: zero padding of each convolution, in pixels on each side.
        hidden: number of output features of the first linear layer.
        dropout: dropout probability after the first linear layer.
        checkpoint_activations: recompute activations in the backward pass.

    Raises `ValueError` if the inputs are too small for the pooling layers.
    """

    def __init__(
        self,
        in_channels: int,
        height: int,
        width: int,
        num_classes: int,
        channels: Sequence[int] = (20, 20),
        kernel_size: int = 5,
        padding: int = 0,
        hidden: int = 50,
        dropout: float = 0.0,
        checkpoint_activations: bool = False,
    ):
        smallest = smallest_side(len(channels), kernel_size, padding)
        if min(height, width) < smallest:
            layers = f"{len(channels)} convolutions of {kernel_size}×{kernel_size}, each followed by 2×2 max pooling"
            least = f"they must be at least {smallest}×{smallest}"
            raise ValueError(f"inputs of {height}×{width} are too small for {layers}: {least}")
        blocks: OrderedDict[str, nn.Module] = OrderedDict()
        for i, (inputs, outputs) in enumerate(pairwise((in_channels, *channels)), start=1):
            conv = nn.Conv2d(inputs, outputs, kernel_size, padding=padding)
            relu, pool = nn.ReLU(inplace=True), nn.MaxPool2d(2)
            blocks[f"conv{i}"] = Block(checkpoint_activations, conv=conv, relu=relu, pool=pool)
            height, width = ((side + 2 * padding - kernel_size + 1) // 2 for side in (height, width))
        fc = nn.Linear(channels[-1] * height * width, hidden)
        # Dropout with p = 0 would still consume random numbers.
        optional = {"dropout": nn.Dropout(dropout)} if dropout else {}
        blocks["hidden"] = Block(
            checkpoint_activations, flatten=nn.Flatten(), fc=fc, relu=nn.ReLU(inplace=True), **optional
        )
        blocks["head"] = Block(checkpoint_activations, fc=nn.Linear(hidden, num_classes))
        super().__init__(blocks)

    def blocks(self) -> list[tuple[str, nn.Module]]:
        return list(self.named_children())


def smallest_side(num_convolutions: int, kernel_size: int, padding: int) -> int:
    """Return the smallest input side in pixels for which the last 2×2 pooling outputs at least one pixel."""
    side = 1
    for _ in range(num_convolutions):
        side = 2 * side + kernel_size - 1 - 2 * padding
    return side
