"""A network that ends the process in the fifth call of its forward pass."""

import os

import torch
from torch import nn

from helpers.stacks.plain import data

__all__ = ["data", "model"]


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(6, 3), 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 5:
            os.write(2, b"the last words\n")
            os._exit(1)
        return self.layer(inputs)


def model() -> nn.Module:
    return Network()
