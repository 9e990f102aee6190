"""A network that keeps its past means in a list."""

import torch
from torch import nn

from helpers.stacks.plain import data

__all__ = ["data", "model"]


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.means = nn.Linear(6, 3), list[torch.Tensor]()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.means.append(inputs.mean())
        return self.layer(inputs) + torch.stack(self.means[-3:]).mean()


def model() -> nn.Module:
    return Network()
