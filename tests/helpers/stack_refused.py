"""A network whose forward pass reads a value, which `torch.func.vmap` cannot do."""

import torch
from torch import nn


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        scale = 2.0 if inputs.mean().item() > 0 else 0.5  # this line
        return self.layer(inputs) * scale


def model() -> nn.Module:
    return Network()


def data() -> torch.utils.data.Dataset:
    inputs = torch.randn(96, 6, generator=torch.Generator().manual_seed(0))
    return torch.utils.data.TensorDataset(inputs, inputs[:, :3].argmax(1))
