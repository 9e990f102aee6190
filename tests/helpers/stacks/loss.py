"""A loss with a state of its own: the mean of the outputs so far."""

import torch
from torch import nn

from helpers.stacks.plain import data

__all__ = ["data", "loss", "model"]


def model() -> nn.Module:
    return nn.Linear(6, 3)


class Loss(nn.Module):
    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.seen.lerp_(outputs.mean(0), 0.5)
        return nn.functional.cross_entropy(outputs + self.seen, targets, reduction="none").mean()


loss = Loss()
