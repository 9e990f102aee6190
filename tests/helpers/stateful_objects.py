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
    """A cross-entropy with weights of classes by how often they were seen in training, and a buffer that grows."""

    def __init__(self):
        super().__init__()
        self.register_buffer("frequency", torch.full((3,), 1 / 3))
        self.register_buffer("calls", torch.zeros((), dtype=torch.uint16))
        self.register_buffer("grown", torch.ones(0))

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if self.training:
            seen = torch.bincount(targets, minlength=3) / len(targets)
            self.frequency.lerp_(seen.to(self.frequency), 0.3)
            self.grown = torch.cat([self.grown, self.grown.new_ones(1)])
        self.calls = (self.calls.int() + 1).to(torch.uint16)
        weights = (1 / self.frequency.clamp(min=0.05)).to(outputs.dtype)
        loss = (cross_entropy(outputs, targets, reduction="none") * weights[targets]).mean()
        return loss / (1 + 0.1 * len(self.grown))


def quiet() -> nn.Module:
    layers = {"first": nn.Linear(5, 8), "keeps": Keeps(noise=0), "tanh": nn.Tanh(), "last": nn.Linear(8, 3)}
    return nn.Sequential(OrderedDict(layers))


def named_chain() -> nn.Module:
    return nn.Sequential(OrderedDict({"first": nn.Linear(5, 8), "tanh": nn.Tanh(), "last": nn.Linear(8, 3)}))


def samples(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(count, 5, generator=torch.Generator().manual_seed(count))
    return x, (x.sum(1) > 0).long() + (x[:, 0] > 1)


DATA = samples(60), samples(21)
SHORT = ("device=cpu", "device.threads=1", "optimizer=sgd", "optimizer.lr=0.05", "schedule=constant", "batch_size=12")


def train_given(overrides: tuple[str, ...], directory: Path, **code: Any) -> Any:
    """Train a run with code of the user on this rank; if there is a checkpoint in `directory`, it is resumed."""
    given = user_code.passed(**{"model": everything, "data": DATA, "loss": Weighted()} | code)
    with user_code.using(given):
        return train_on_rank(compose_config(*given.added_to([*SHORT, *overrides])), directory)


class Odd(nn.Module):
    """State of kinds that not every format, kernel or collective knows."""

    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(1))
        self.log: list[float] = []
        self.register_buffer("wide", torch.full((3,), 1 + 2j, dtype=torch.complex128))
        self.register_buffer("small", torch.ones(4).to(torch.float8_e5m2))
        self.register_buffer("count", torch.zeros(2, dtype=torch.uint16))
        self.register_buffer("none", torch.zeros(0, 3))
        self.register_buffer("mask", torch.full((2, 2), -torch.inf).triu(1))
        self.register_buffer("view", self.wide[1:])  # shares its memory

    def get_extra_state(self) -> dict[str, object]:
        return {"log": list(self.log), "last": torch.tensor(self.log[-1:]), "text": "ä", 3: None}

    def set_extra_state(self, state: dict[str, object]) -> None:
        self.log = list(state["log"])  # pyright: ignore[reportArgumentType]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.log.append(float(x.detach().mean()))
            self.wide += 1j
            self.small.copy_(-self.small.float())
            self.count.copy_(self.count.int() + 1)
        scale = self.wide.imag.sum().to(x.dtype) + self.count.int().sum() + self.mask.exp().sum() + sum(self.log)
        return x * self.temperature / (10 + scale)


class Renames(nn.Sequential):
    """Its state dict has other names, which its `load_state_dict` knows."""

    def __init__(self):
        super().__init__(nn.Linear(5, 3))
        self._register_state_dict_hook(lambda module, state, *_: state.update(w=state.pop("0.weight")))
        self.register_load_state_dict_pre_hook(lambda module, state, *_: state.update({"0.weight": state.pop("w")}))


class Forgets(Renames):
    """Its `load_state_dict` does not know the names of its state dict."""

    def _load_from_state_dict(self, *arguments: Any) -> None:
        pass

    def load_state_dict(self, state: Any, *arguments: Any, **options: Any) -> Any:
        return super().load_state_dict({key: value for key, value in state.items() if key != "w"}, strict=False)


class Unsavable(nn.Sequential):
    """Its extra state is `extra`."""

    def __init__(self, extra: Any):
        super().__init__(nn.Linear(5, 3))
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


class SparseBuffer(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(5, 3))
        self.register_buffer("graph", torch.eye(4).to_sparse())


class Evolves(nn.Module):
    """State in attributes, in buffers that are not saved, that begin as None, or whose form changes; all is used."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self._started, self.temperature, self.phase, self.level = 0, False, 2.0, "warm", None
        self.scale = np.exp
        self.register_buffer("late", None)
        self.register_buffer("grown", torch.zeros(0))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))  # float64 later
        self.register_buffer("power", torch.ones(5), persistent=False)
        self.register_buffer("late_power", None, persistent=False)
        self.register_buffer("mask", torch.ones(5), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1  # in evaluations, too
        self.grown = torch.cat([self.grown, torch.full((1,), 1 / self.calls)])
        if self.training:
            self.temperature *= self.scale(-0.1)
            self._started, self.level = True, 0.1 * self.calls
            self.phase = "warm" if self.calls < 3 else "cold"
            self.late = torch.full((5,), 0.1) if self.late is None else self.late * 0.9
            self.late_power = self.power.clone() if self.late_power is None else self.late_power * 0.8
            self.count = self.count.double() + 0.1
            self.power *= 0.9
        shift = self.grown.sum() + self.count + self.late  # before a step, no evaluation is possible
        scale = self.temperature * self.power * self.mask * (1.5 if self.phase == "warm" else 1.0)
        x = x * scale.to(x) / (1 + 0.1 * self.calls)
        return x + (shift * self.level + self.late_power).to(x)


class CountsSteps(nn.Linear):
    """It scales its outputs by a number that it counts."""

    def __init__(self) -> None:
        super().__init__(5, 3)
        self.steps, self.width = 0, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps, self.width = self.steps + 1, x.shape[1]
        return super().forward(x) * self.steps


def evolving() -> nn.Module:
    layers = {"first": nn.Linear(5, 5), "tanh": nn.Tanh(), "evolves": Evolves(), "last": nn.Linear(5, 3)}
    return nn.Sequential(OrderedDict(layers))


def everything() -> nn.Module:
    """A network with state of all kinds."""
    first, second = {"first": nn.Linear(5, 8), "keeps": Keeps()}, {"tanh": nn.Tanh(), "odd": Odd()}
    last = {"middle": nn.Linear(8, 5), "evolves": Evolves(), "last": nn.Linear(5, 3)}
    return nn.Sequential(OrderedDict(first | second | last))


class Remembers(nn.Sequential):
    """It keeps a list, and counts high inputs, of which each process has seen others."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 3))
        self.seen, self.constant, self.peaks = list[float](), [1.0], 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.peaks += int(x.max() > 2.5)
            self.seen.append(self.peaks)
        return super().forward(x) / (1 + self.peaks)


class Fails(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(5, 3))

    def state_dict(self, *arguments: Any, **options: Any) -> Any:
        raise KeyError("in state_dict")
