"""A network whose scale depends on how often it was called."""

import torch
from torch import nn

from helpers.stacks.plain import data

__all__ = ["data", "model"]


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(6, 3), 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        return self.layer(inputs) / max(self.calls, 1)


def model() -> nn.Module:
    return Network()
