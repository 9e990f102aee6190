"""Residual networks: torchvision's layers, names and numbers, with places where they can be cut."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torchvision.models import resnet

from models.recompute import Block, recomputable


class BasicBlock(resnet.BasicBlock):
    """Two 3×3 convolutions, and the input added to them."""

    checkpoint_activations = False
    forward = recomputable(resnet.BasicBlock.forward)


class Bottleneck(resnet.Bottleneck):
    """A 1×1, a 3×3 and a 1×1 convolution, and the input added to them; the stride is in the 3×3 (version 1.5)."""

    checkpoint_activations = False
    forward = recomputable(resnet.Bottleneck.forward)


DEPTHS: dict[int, tuple[type[BasicBlock | Bottleneck], list[int]]] = {
    18: (BasicBlock, [2, 2, 2, 2]),
    34: (BasicBlock, [3, 4, 6, 3]),
    50: (Bottleneck, [3, 4, 6, 3]),
    101: (Bottleneck, [3, 4, 23, 3]),
    152: (Bottleneck, [3, 8, 36, 3]),
}
"""The block, and how many of it each of the four layers has, by the number of layers with weights."""

NORMS: dict[str, Callable[[int], nn.Module]] = {
    "batch": nn.BatchNorm2d,
    "group": partial(nn.GroupNorm, 32),  # every width here is a multiple of 32
}

STEMS = ("imagenet", "cifar")


class ResNet(resnet.ResNet):
    """He et al., Deep Residual Learning for Image Recognition (2016), version 1.5, over inputs [n, channels, h, w].

    A subclass of torchvision's: parameters have its names, so that its weights load, and its initial values.

    Args:
        depth: one of `DEPTHS`.
        stem: `imagenet` halves the inputs twice before the first block (7×7 convolution of stride 2, max-pooling);
            `cifar` leaves inputs of about 32×32 their size (3×3 convolution, no pooling; section 4.2 of the paper).
        norm: `batch` normalisation, or `group` normalisation (Wu and He, 2018; 32 groups), which treats each sample
            alone: the same numbers however a batch is split.
        checkpoint_activations: keep only the blocks' inputs for the backward pass.
    """

    def __init__(
        self,
        depth: int,
        in_channels: int = 3,
        num_classes: int = 1000,
        stem: str = "imagenet",
        norm: str = "batch",
        checkpoint_activations: bool = False,
    ):
        block, counts = DEPTHS[depth]
        super().__init__(block, counts, num_classes, norm_layer=NORMS[norm])
        self.flatten = nn.Flatten()  # no module in torchvision, whose forward pass calls a function
        self.checkpoint_activations = checkpoint_activations
        for residual in self._residual_blocks().values():
            residual.checkpoint_activations = checkpoint_activations
        if stem == "cifar":
            self._replace_conv1(nn.Conv2d(in_channels, 64, 3, padding=1, bias=False))
            self.maxpool = nn.Identity()
        elif in_channels != 3:
            self._replace_conv1(nn.Conv2d(in_channels, 64, 7, stride=2, padding=3, bias=False))

    def blocks(self) -> list[tuple[str, nn.Module]]:
        """The places where the network can be cut, in the order of the forward pass: stem, each block, head.

        The blocks are the network's own modules, under their names in it. Stem and head are views of its modules, made
        anew at each call: kept, they would miss a layer that was replaced (by its synchronised or replicated twin).
        """
        again = self.checkpoint_activations
        stem = Block(again, conv1=self.conv1, bn1=self.bn1, relu=self.relu, maxpool=self.maxpool)
        head = Block(again, avgpool=self.avgpool, flatten=self.flatten, fc=self.fc)
        return [("stem", stem), *self._residual_blocks().items(), ("head", head)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _, block in self.blocks():
            x = block(x)
        return x

    def _residual_blocks(self) -> dict[str, BasicBlock | Bottleneck]:
        layers = {name: getattr(self, name) for name in ("layer1", "layer2", "layer3", "layer4")}
        return {f"{name}.{i}": block for name, layer in layers.items() for i, block in enumerate(layer)}

    def _replace_conv1(self, conv: nn.Conv2d) -> None:
        nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
        self.conv1 = conv
