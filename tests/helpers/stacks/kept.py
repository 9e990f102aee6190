"""A network that keeps its activations in an attribute."""

import torch
from torch import nn

from helpers.stacks.plain import data

__all__ = ["data", "model"]


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.activations = nn.Linear(6, 3), None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.activations = self.layer(inputs)
        return self.activations


def model() -> nn.Module:
    return Network()
