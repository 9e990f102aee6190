"""A loss whose scale is a global variable, which each call changes."""

import torch
from torch import nn

from helpers.stacks.plain import data, model

__all__ = ["data", "loss", "model"]

scale = 1.0


def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    global scale
    if torch.is_grad_enabled():
        scale *= 0.9
    return nn.functional.cross_entropy(outputs, targets, reduction="none").mean() * scale
