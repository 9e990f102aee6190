"""Tests of what all modes share: the memory format of a network."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from runner.parallel.base import move


class Positions(nn.Module):
    """Adds positions, whose memory `view` relies on, to a sequence."""

    def __init__(self):
        super().__init__()
        self.positions = nn.Parameter(torch.randn(1, 3, 2, 2))
        self.register_buffer("mixing", torch.eye(12).to_sparse())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.mm(self.mixing, (x.flatten(1) + self.positions.view(-1)).T)


class ComplexWeight(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 3, 2, 2, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.conv2d(x.to(self.weight.dtype), self.weight).abs()


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "3-d": (lambda: nn.Sequential(nn.Conv3d(3, 4, 2), nn.BatchNorm3d(4), nn.ConvTranspose3d(4, 2, 2)), (3, 3, 3, 3)),
    "1-d": (lambda: nn.Sequential(nn.Conv1d(3, 4, 2), nn.ConvTranspose1d(4, 2, 2)), (3, 5)),
    "2-d": (lambda: nn.Sequential(nn.Conv2d(3, 4, 2), nn.ConvTranspose2d(4, 2, 2)), (3, 5, 5)),
    "positions": (Positions, (3, 2, 2)),
    "complex": (ComplexWeight, (3, 4, 4)),
    "complex convolution": (lambda: nn.Sequential(nn.Conv2d(3, 4, 2, dtype=torch.complex64)), (3, 4, 4)),
    "parametrized": (
        lambda: nn.Sequential(weight_norm(nn.Conv2d(3, 4, 2)), spectral_norm(nn.Conv3d(1, 1, 1))),
        (3, 4, 4),
    ),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_channels_last_converts_what_torch_can_and_computes_the_same(name):
    torch.manual_seed(0)
    build, shape = NETWORKS[name]
    model = build().eval()
    converted = copy.deepcopy(model)
    move(converted, torch.device("cpu"), channels_last=True)
    if name == "parametrized":
        model, converted = model[0], converted[0]
    x = torch.randn(2, *shape, dtype=torch.complex64 if name == "complex convolution" else torch.float32)
    torch.testing.assert_close(converted(x), model(x))
    if name == "2-d":
        assert all(conv.weight.is_contiguous(memory_format=torch.channels_last) for conv in converted)
        assert converted(x).is_contiguous(memory_format=torch.channels_last)
