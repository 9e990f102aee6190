"""Options of the multi-layer perceptron for agents."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from runner.config.errors import check
from runner.model.base import MOST_UNITS, Model


@dataclass
class QNet(Model):
    """A multi-layer perceptron that computes action values, or classifies flattened images (`models.qnet.QNet`)."""

    hidden: tuple[int, ...] = (128, 128)
    dueling: bool = False

    num_dims: ClassVar[int | None] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        possible = all(0 < width <= MOST_UNITS for width in self.hidden)
        why = f"every layer needs at least one unit, and at most {MOST_UNITS:,}"
        check(possible, "hidden", list(self.hidden), why, "for example [256,256]")

    def network(self, shape: tuple[int, ...], num_classes: int) -> torch.nn.Module:
        from models import qnet

        return qnet.QNet(math.prod(shape), num_classes, self.hidden, self.dueling, self.checkpoint_activations)
