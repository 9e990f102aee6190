"""A small convolutional classifier in the manner of LeNet-5 (LeCun et al., 1998)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from models.recompute import Block


class ConvNet(nn.Sequential):
    """Convolutions, each with a rectifier and a 2×2 pooling, then two linear layers.

    As it stands the 20-20-50-10 network: on 28×28 inputs its first linear layer is 20·4·4 = 320 wide.

    Args:
        in_channels: channels of the inputs [n, in_channels, height, width].
        channels: output channels of each convolution.
        kernel_size: pixels of a side of every convolution's kernel.
        padding: pixels of zeros around every convolution's input.
        hidden: width of the layer between the convolutions and the classes.
        dropout: share of the hidden layer that is dropped in training.
        checkpoint_activations: keep only the blocks' inputs for the backward pass.

    Raises:
        ValueError: when the inputs are so small that the poolings leave nothing of them.
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
        least = smallest_side(len(channels), kernel_size, padding)
        if min(height, width) < least:
            raise ValueError(
                f"inputs of {height}×{width} are too small for {len(channels)} convolutions of "
                f"{kernel_size}×{kernel_size}, each followed by a 2×2 pooling: they take {least}×{least} or more"
            )
        blocks: OrderedDict[str, nn.Module] = OrderedDict()
        for i, (inputs, outputs) in enumerate(pairwise((in_channels, *channels)), start=1):
            conv = nn.Conv2d(inputs, outputs, kernel_size, padding=padding)
            relu, pool = nn.ReLU(inplace=True), nn.MaxPool2d(2)
            blocks[f"conv{i}"] = Block(checkpoint_activations, conv=conv, relu=relu, pool=pool)
            height, width = ((side + 2 * padding - kernel_size + 1) // 2 for side in (height, width))
        fc = nn.Linear(channels[-1] * height * width, hidden)
        # A dropout of nothing would still draw random numbers.
        drop = {"dropout": nn.Dropout(dropout)} if dropout else {}
        blocks["hidden"] = Block(
            checkpoint_activations, flatten=nn.Flatten(), fc=fc, relu=nn.ReLU(inplace=True), **drop
        )
        blocks["head"] = Block(checkpoint_activations, fc=nn.Linear(hidden, num_classes))
        super().__init__(blocks)

    def blocks(self) -> list[tuple[str, nn.Module]]:
        """The places where the network can be cut, in the order of the forward pass: conv1, conv2, …, hidden, head."""
        return list(self.named_children())


def smallest_side(num_convolutions: int, kernel_size: int, padding: int) -> int:
    """The least height and width of which `num_convolutions`, each with its 2×2 pooling, leave one pixel."""
    side = 1
    for _ in range(num_convolutions):
        side = 2 * side + kernel_size - 1 - 2 * padding
    return side
