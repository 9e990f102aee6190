"""A network with a hook, which doubles the outputs of a layer."""

import torch
from torch import nn

from helpers.stacks.plain import data

__all__ = ["data", "model"]


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.layer.register_forward_hook(lambda module, inputs, outputs: outputs * 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(inputs)


def model() -> nn.Module:
    return Network()
