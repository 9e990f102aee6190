"""The networks of an agent: options for `models.qnet`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from runner.config.errors import check
from runner.model.base import Model


@dataclass
class QNet(Model):
    """A multi-layer perceptron: action values of observations, or classes of flattened images (`models.qnet.QNet`).

    Args:
        hidden: widths of the layers between inputs and outputs.
        duelling: tell the state's value and the actions' advantages apart (Wang et al., 2016).
    """

    hidden: tuple[int, ...] = (128, 128)
    duelling: bool = False

    num_dims: ClassVar[int | None] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        positive = all(width > 0 for width in self.hidden)
        check(positive, "hidden", list(self.hidden), "each layer needs a width > 0", "as in [256,256]")

    def network(self, shape: tuple[int, ...], num_classes: int) -> torch.nn.Module:
        from models import qnet  # here, not above: the config's errors are told before torch is loaded

        return qnet.QNet(math.prod(shape), num_classes, self.hidden, self.duelling, self.checkpoint_activations)
