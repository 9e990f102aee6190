"""A network whose scale a hook sets, by the seed of the run."""

import torch
from torch import nn

from helpers.stacks.plain import data

__all__ = ["after_step", "data", "model"]


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(6, 3), 1.0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(inputs) * self.scale


def model() -> nn.Module:
    return Network()


def after_step(state) -> None:
    state.model.scale = 1 + state.run.seed
