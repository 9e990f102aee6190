"""torchvision's residual networks, divided into blocks between which a network can be split into stages."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torchvision.models import resnet

from runner.models.layers import Block, make_recomputable

DEPTHS: dict[int, tuple[type[resnet.BasicBlock | resnet.Bottleneck], list[int]]] = {
    18: (resnet.BasicBlock, [2, 2, 2, 2]),
    34: (resnet.BasicBlock, [3, 4, 6, 3]),
    50: (resnet.Bottleneck, [3, 4, 6, 3]),
    101: (resnet.Bottleneck, [3, 4, 23, 3]),
    152: (resnet.Bottleneck, [3, 8, 36, 3]),
}
"""For each depth of the network: the type of its blocks, and the number of blocks in each of its four layers."""

NORMS: dict[str, Callable[[int], nn.Module]] = {
    "batch": nn.BatchNorm2d,
    "group": partial(nn.GroupNorm, 32),  # the number of channels of every layer is a multiple of 32
}


class ResNet(resnet.ResNet):
    """A residual network, version 1.5, for inputs [n, in_channels, height, width], with torchvision's parameter names.

    He et al., Deep Residual Learning for Image Recognition (2016).

    `depth` is a key of `DEPTHS`, and `norm` one of `NORMS`: batch normalization, or group normalization with 32 groups
    (Wu and He, 2018), computed per sample. The stem `imagenet` downsamples the inputs by 4 (7×7 convolution with stride
    2, max pooling); `cifar` keeps the size of inputs of about 32×32 (3×3 convolution, no pooling; section 4.2 of the
    paper). With `checkpoint_activations`, the activations of each block are recomputed in the backward pass.
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
        self.flatten = nn.Flatten()  # torchvision calls torch.flatten in its forward pass
        self.checkpoint_activations = checkpoint_activations
        for _, residual in self._residual_blocks() if checkpoint_activations else ():
            make_recomputable(residual)
        if stem == "cifar":
            self._replace_conv1(nn.Conv2d(in_channels, 64, 3, padding=1, bias=False))
            self.maxpool = nn.Identity()
        elif in_channels != 3:
            self._replace_conv1(nn.Conv2d(in_channels, 64, 7, stride=2, padding=3, bias=False))

    def blocks(self) -> list[tuple[str, nn.Module]]:
        """Return the blocks between which the network can be split, in forward order: stem, residual blocks, head.

        The stem and the head are created in each call, so that they contain layers with which a wrapper has replaced
        others.
        """
        recompute = self.checkpoint_activations
        stem = Block(recompute, conv1=self.conv1, bn1=self.bn1, relu=self.relu, maxpool=self.maxpool)
        head = Block(recompute, avgpool=self.avgpool, flatten=self.flatten, fc=self.fc)
        return [("stem", stem), *self._residual_blocks(), ("head", head)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _, block in self.blocks():
            x = block(x)
        return x

    def _residual_blocks(self) -> list[tuple[str, nn.Module]]:
        layers = (self.layer1, self.layer2, self.layer3, self.layer4)
        return [
            (f"layer{i}.{name}", block) for i, layer in enumerate(layers, 1) for name, block in layer.named_children()
        ]

    def _replace_conv1(self, conv: nn.Conv2d) -> None:
        nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
        self.conv1 = conv
