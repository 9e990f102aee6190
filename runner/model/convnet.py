"""Options of the small convolutional network."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from runner.config.errors import ConfigError, check, check_range
from runner.model.base import Model


@dataclass
class ConvNet(Model):
    """Convolutions with poolings, and two linear layers: 20-20-50-10 as it stands (`models.convnet.ConvNet`).

    Args:
        channels: output channels of each convolution.
        kernel_size: pixels of a side of their kernels.
        padding: pixels of zeros around their inputs.
        hidden: width of the layer before the classes.
        dropout: share of the hidden layer that is dropped in training.
    """

    channels: tuple[int, ...] = (20, 20)
    kernel_size: int = 5
    padding: int = 0
    hidden: int = 50
    dropout: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        positive = bool(self.channels) and min(self.channels) > 0
        check(positive, "channels", list(self.channels), "each convolution needs a width > 0", "as in [20,20]")
        check_range(self, "kernel_size", least=1, most=31)
        # Half a kernel keeps the size; a wider border would hold positions that see nothing but zeros.
        check_range(self, "padding", least=0, most=self.kernel_size // 2)
        check_range(self, "hidden", least=1)
        check_range(self, "dropout", least=0, below=1)

    def network(self, shape: tuple[int, ...], num_classes: int) -> torch.nn.Module:
        from models import convnet  # here, not above: the config's errors are told before torch is loaded

        channels, height, width = shape
        try:
            return convnet.ConvNet(
                channels,
                height,
                width,
                num_classes,
                channels=self.channels,
                kernel_size=self.kernel_size,
                padding=self.padding,
                hidden=self.hidden,
                dropout=self.dropout,
                checkpoint_activations=self.checkpoint_activations,
            )
        except ValueError as error:
            larger = "larger inputs (data.size, where the data set has it), a smaller kernel, or model=tiny"
            raise ConfigError("kernel_size", self.kernel_size, str(error), larger) from None
