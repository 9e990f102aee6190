"""Options of the small convolutional networks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from runner.config.errors import ConfigError, check, check_range
from runner.model.base import MOST_UNITS, Model


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
        possible = bool(self.channels) and all(0 < count <= MOST_UNITS for count in self.channels)
        why = f"every convolution needs at least one output channel, and at most {MOST_UNITS:,}"
        check(possible, "channels", list(self.channels), why, "for example model.channels=[20,20]")
        check_range(self, "kernel_size", least=1, most=31)
        # Half a kernel keeps the image size; with more, some outputs would depend on nothing but zeros.
        check_range(self, "padding", least=0, most=self.kernel_size // 2)
        check_range(self, "hidden", least=1, most=MOST_UNITS)
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
