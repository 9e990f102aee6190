"""Options of the networks in `models/`: small convolutional networks, residual networks, multi-layer perceptrons."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from runner.config.errors import ConfigError, check, check_choice, check_range
from runner.model.base import Model

MAX_UNITS = 10_000_000
"""The largest number of features that a layer may have. torch cannot even compute the size of far larger layers."""


@dataclass
class ConvNet(Model):
    """Convolutions with max pooling, then two linear layers (`models.convnet.ConvNet`)."""

    channels: tuple[int, ...] = (20, 20)
    kernel_size: int = 5
    padding: int = 0
    hidden: int = 50
    dropout: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        possible = bool(self.channels) and all(0 < count <= MAX_UNITS for count in self.channels)
        why = f"every convolution needs at least one output channel, and at most {MAX_UNITS:,}"
        check(possible, "channels", list(self.channels), why, "for example model.channels=[20,20]")
        check_range(self, "kernel_size", least=1, most=31)
        # Half a kernel keeps the image size; with more, some outputs would depend on nothing but zeros.
        check_range(self, "padding", least=0, most=self.kernel_size // 2)
        check_range(self, "hidden", least=1, most=MAX_UNITS)
        check_range(self, "dropout", least=0, below=1)

    def network(self, shape: tuple[int, ...], num_classes: int) -> torch.nn.Module:
        from models import convnet

        channels, height, width = shape
        options = (self.channels, self.kernel_size, self.padding, self.hidden, self.dropout)
        try:
            return convnet.ConvNet(channels, height, width, num_classes, *options, self.checkpoint_activations)
        except ValueError as error:
            remedy = "use larger inputs (data.size, if the data set has it), a smaller model.kernel_size, or model=tiny"
            raise ConfigError("kernel_size", self.kernel_size, str(error), remedy) from None


@dataclass
class ResNet(Model):
    """A residual network with torchvision's parameter names (`models.resnet.ResNet`)."""

    depth: int = 50
    stem: str = "imagenet"
    norm: str = "batch"

    def __post_init__(self) -> None:
        super().__post_init__()
        depths = (18, 34, 50, 101, 152)
        why = f"it must be one of {', '.join(map(str, depths))}"
        check(self.depth in depths, "depth", self.depth, why, "for example model.depth=50")
        check_choice(self, "stem", ("imagenet", "cifar"))
        check_choice(self, "norm", ("batch", "group"))

    def network(self, shape: tuple[int, ...], num_classes: int) -> torch.nn.Module:
        from models import resnet

        options = (self.stem, self.norm, self.checkpoint_activations)
        return resnet.ResNet(self.depth, shape[0], num_classes, *options)


@dataclass
class QNet(Model):
    """A multi-layer perceptron that computes action values, or classifies flattened images (`models.qnet.QNet`)."""

    hidden: tuple[int, ...] = (128, 128)
    dueling: bool = False

    num_dims: ClassVar[int | None] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        possible = all(0 < width <= MAX_UNITS for width in self.hidden)
        why = f"every layer needs at least one unit, and at most {MAX_UNITS:,}"
        check(possible, "hidden", list(self.hidden), why, "for example [256,256]")

    def network(self, shape: tuple[int, ...], num_classes: int) -> torch.nn.Module:
        from models import qnet

        return qnet.QNet(math.prod(shape), num_classes, self.hidden, self.dueling, self.checkpoint_activations)
