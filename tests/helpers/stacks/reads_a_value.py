"""A network whose forward pass reads a value, which `torch.func.vmap` cannot do."""

import torch
from torch import nn

from helpers.stacks.plain import data

__all__ = ["data", "model"]


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        scale = 2.0 if inputs.mean().item() > 0 else 0.5  # this line
        return self.layer(inputs) * scale


def model() -> nn.Module:
    return Network()
