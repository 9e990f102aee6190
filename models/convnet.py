"""A small convolutional classifier similar to LeNet-5 (LeCun et al., 1998)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from runner.models.layers import Block


class ConvNet(nn.Sequential):
    """Convolutions, each followed by ReLU and 2×2 max pooling, then two linear layers.

    The inputs are [n, in_channels, height, width], the outputs [n, num_classes]. There is a convolution, with square
    kernels and zero padding on each side, for each number of output `channels`; `hidden` is the number of features
    between the linear layers, and `dropout` the probability of dropout there. With `checkpoint_activations`, the
    activations of each block are recomputed in the backward pass.

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
        given = f"{height}×{width}"
        blocks: OrderedDict[str, nn.Module] = OrderedDict()
        for i, (inputs, outputs) in enumerate(pairwise((in_channels, *channels)), start=1):
            conv = nn.Conv2d(inputs, outputs, kernel_size, padding=padding)
            relu, pool = nn.ReLU(inplace=True), nn.MaxPool2d(2)
            blocks[f"conv{i}"] = Block(checkpoint_activations, conv=conv, relu=relu, pool=pool)
            height, width = ((side + 2 * padding - kernel_size + 1) // 2 for side in (height, width))
        if min(height, width) < 1:
            layers = f"{len(channels)} convolutions of {kernel_size}×{kernel_size}, each followed by 2×2 max pooling"
            raise ValueError(f"inputs of {given} are too small for {layers}")
        fc = nn.Linear(channels[-1] * height * width, hidden)
        # Dropout with p = 0 would still consume random numbers.
        optional = {"dropout": nn.Dropout(dropout)} if dropout else {}
        blocks["hidden"] = Block(
            checkpoint_activations, flatten=nn.Flatten(), fc=fc, relu=nn.ReLU(inplace=True), **optional
        )
        blocks["head"] = Block(checkpoint_activations, fc=nn.Linear(hidden, num_classes))
        super().__init__(blocks)
