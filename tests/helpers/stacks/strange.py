"""A task whose network nobody would write, for runs in a stack."""

import torch
from torch import nn


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.last.weight = self.first_square = nn.Parameter(torch.randn(8, 8) / 3)
        self.frozen = nn.Parameter(torch.randn(8), requires_grad=False)
        self.head = nn.Linear(8, 3)
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.tensor([True] * 7 + [False]))
        self.register_buffer("mask", torch.tensor([True] * 7 + [False]))

    def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.first(torch.cat((first, second), 1)) * self.frozen * self.mask)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * hidden.detach().abs().mean()
            self.passes += 1
        return self.head(torch.tanh(self.last(hidden) @ self.first_square) - self.mean)


def model() -> nn.Module:
    return Network()


def data() -> torch.utils.data.Dataset:
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(96, 6, generator=draw).split(3, dim=1)
    targets = (inputs[0].sum(1) > inputs[1].sum(1)).long() + (inputs[1][:, 0] > 1).long()
    return torch.utils.data.StackDataset(torch.utils.data.StackDataset(*inputs), targets)  # pyright: ignore


def loss(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    weights = 1.0 + targets
    each = nn.functional.cross_entropy(outputs, targets, reduction="none")
    return (each * weights).sum(), weights.sum()
