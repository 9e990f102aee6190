"""A network, a loss and data of a user with state that is in no parameter; and how ranks train with them."""

import random
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from helpers.compose import compose_config
from helpers.ranks import train_on_rank
from runner.config import user_code


class Keeps(nn.Module):
    """It centers by a running mean that also training uses, counts its calls, and draws from three generators."""

    def __init__(self, noise: float = 1.0):
        super().__init__()
        self.noise = noise
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int16))
        self.register_buffer("last", torch.zeros(8, dtype=torch.complex64))
        self.register_buffer("mask", torch.zeros(1, 1).expand(1, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1  # in evaluations, too
        self.last = torch.complex(x.detach()[0].float(), self.mean.float())  # replaced, and not changed in place
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.3)
        drawn = random.random() + float(np.random.rand()) + float(torch.rand(()))
        x = x - self.mean + 0.01 * self.last.imag.to(x.dtype) + self.mask.to(x.dtype)
        return x * (1 + 0.1 * self.noise * drawn) / (1 + 0.1 * self.calls.to(x.dtype))


class Weighted(nn.Module):
    """A cross-entropy with weights of classes by how often they were seen in training."""

    def __init__(self):
        super().__init__()
        self.register_buffer("frequency", torch.full((3,), 1 / 3))
        self.register_buffer("calls", torch.zeros((), dtype=torch.uint16))

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if self.training:
            seen = torch.bincount(targets, minlength=3) / len(targets)
            self.frequency.lerp_(seen.to(self.frequency), 0.3)
        self.calls = (self.calls.int() + 1).to(torch.uint16)
        weights = (1 / self.frequency.clamp(min=0.05)).to(outputs.dtype)
        return (cross_entropy(outputs, targets, reduction="none") * weights[targets]).mean()


def network(noise: float = 1.0) -> nn.Module:
    layers = {"first": nn.Linear(5, 8), "keeps": Keeps(noise), "tanh": nn.Tanh(), "last": nn.Linear(8, 3)}
    return nn.Sequential(OrderedDict(layers))


def quiet() -> nn.Module:
    return network(noise=0)


def samples(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(count, 5, generator=torch.Generator().manual_seed(count))
    return x, (x.sum(1) > 0).long() + (x[:, 0] > 1)


DATA = samples(60), samples(21)
SHORT = ("device=cpu", "device.threads=1", "optimizer=sgd", "optimizer.lr=0.05", "schedule=constant", "batch_size=12")


def train_given(overrides: tuple[str, ...], directory: Path, **code: Any) -> Any:
    """Train a run with code of the user on this rank; if there is a checkpoint in `directory`, it is resumed."""
    given = user_code.passed(**{"model": network, "data": DATA, "loss": Weighted()} | code)
    with user_code.using(given):
        return train_on_rank(compose_config(*given.added_to([*SHORT, *overrides])), directory)
