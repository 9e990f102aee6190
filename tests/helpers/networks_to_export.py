"""Networks for images of 1×8×8 and ten classes, whose code exporters may trace for batches of one size only."""

import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm


class Lengths(nn.Module):
    """Uses `len`, whose result Python makes a plain number."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x.reshape(len(x), -1))


class Parametrized(Lengths):
    def __init__(self):
        super().__init__()
        self.head = weight_norm(self.head)


class Loops(Lengths):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.head(each.flatten()) for each in x])


class ComplexWeights(nn.Module):
    """Its first parameter is complex; its inputs are not."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 10, dtype=torch.complex64) / 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (nn.functional.relu(x).flatten(1).to(self.weight.dtype) @ self.weight).abs()
