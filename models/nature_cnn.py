"""The convolutional network of deep Q-learning from pixels (Mnih et al., Human-level control, 2015)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from runner.models.layers import Block
from runner.models.qnet import Dueling


class NatureCNN(nn.Sequential):
    """Convolutions with ReLU and without padding, a hidden linear layer, and the values of all actions.

    The inputs are [n, in_channels, height, width], the outputs [n, num_actions]. There is a convolution for each item
    of `channels`, `kernel_sizes` and `strides`; `hidden` is the number of features before the head. With `dueling`,
    separate heads compute the state value and the advantages. With `checkpoint_activations`, the activations of each
    block are recomputed in the backward pass.

    Raises `ValueError` if the inputs are too small for the convolutions.
    """

    def __init__(
        self,
        in_channels: int,
        height: int,
        width: int,
        num_actions: int,
        channels: Sequence[int] = (32, 64, 64),
        kernel_sizes: Sequence[int] = (8, 4, 3),
        strides: Sequence[int] = (4, 2, 1),
        hidden: int = 512,
        dueling: bool = False,
        checkpoint_activations: bool = False,
    ):
        given = f"{height}×{width}"
        blocks: OrderedDict[str, nn.Module] = OrderedDict()
        layers = zip(pairwise((in_channels, *channels)), kernel_sizes, strides, strict=True)
        for i, ((inputs, outputs), kernel_size, stride) in enumerate(layers, start=1):
            height, width = ((side - kernel_size) // stride + 1 for side in (height, width))
            if min(height, width) < 1:
                kernels = ", ".join(f"{size}×{size}" for size in kernel_sizes)
                raise ValueError(f"images of {given} are too small for convolutions of {kernels} pixels")
            conv = nn.Conv2d(inputs, outputs, kernel_size, stride)
            blocks[f"conv{i}"] = Block(checkpoint_activations, conv=conv, relu=nn.ReLU(inplace=True))
        fc = nn.Linear(channels[-1] * height * width, hidden)
        blocks["hidden"] = Block(checkpoint_activations, flatten=nn.Flatten(), fc=fc, relu=nn.ReLU(inplace=True))
        blocks["head"] = Dueling(hidden, num_actions) if dueling else nn.Linear(hidden, num_actions)
        super().__init__(blocks)
