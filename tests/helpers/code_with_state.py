"""Code of users that keeps numbers, tensors and generators outside of the weights of its network."""

from __future__ import annotations

import copy
import itertools
import random
from collections import deque
from collections.abc import Callable
from enum import Enum
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from helpers.strange_networks import made_once, tanh

calls = 0
weight = 0.0
generator = torch.Generator().manual_seed(5)


judge = nn.Linear(2, 3, dtype=torch.float64)
teacher = nn.ModuleDict({"layers": made_once(tanh), "norm": nn.BatchNorm1d(2)}).double().requires_grad_(False)
first = copy.deepcopy(teacher.state_dict())


def reset() -> None:
    """Give the names of this file the values of their beginning."""
    global calls, weight
    calls, weight = 0, 0.0
    generator.manual_seed(5)
    teacher.load_state_dict(first)


def of_teacher(model: nn.Module, batch: Any) -> torch.Tensor:
    """The teacher, a module of the file, is an average of the network, and has running statistics in any mode."""
    if model.training:
        for mine, average in zip(model.parameters(), teacher["layers"].parameters(), strict=True):
            average.data.mul_(0.5).add_(mine.data, alpha=0.5)
    outputs = model(batch[0])
    wanted = teacher["norm"](teacher["layers"](batch[0])) + teacher["norm"].running_mean
    return cross_entropy(outputs, batch[1]) + (outputs - wanted).square().mean()


class Rate(float, Enum):
    PENALTY = 0.1


def of_counter(model: nn.Module, batch: Any) -> torch.Tensor:
    """The weight of a penalty rises with the number of the call."""
    global calls
    outputs, calls = model(batch[0]), calls + 1
    return cross_entropy(outputs, batch[1]) + Rate.PENALTY * calls * outputs.square().mean()


def of_generator(model: nn.Module, batch: Any) -> torch.Tensor:
    noise = torch.randn(batch[0].shape, generator=generator, dtype=torch.float64)
    return cross_entropy(model(batch[0] + 0.3 * noise.to(batch[0])), batch[1])


def of_closure() -> Callable[[nn.Module, Any], torch.Tensor]:
    """Return a step that uses values in variables of a function, in objects, and in an attribute of itself."""
    numbers, rng, other = itertools.count(1), np.random.default_rng(5), random.Random(5)
    memory: dict[str, Any] = {"mean": None, "last": deque(maxlen=3), "seen": np.zeros(2)}
    options, scale = SimpleNamespace(decay=1.0), 1.0

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        nonlocal scale
        step.calls = getattr(step, "calls", 0) + 1  # pyright: ignore[reportFunctionMemberAccess]
        scale *= 1.01
        options.decay *= 0.9
        noise = torch.from_numpy(rng.normal(size=batch[0].shape)) + other.random()
        outputs = model(batch[0] + 0.3 * noise.to(batch[0])) * scale * options.decay
        mean, last = outputs.detach().mean(0), memory["last"]
        memory["mean"] = mean if memory["mean"] is None else 0.9 * memory["mean"] + 0.1 * mean
        last.append(float(mean[0]))
        memory["seen"][0] += 1
        shift = memory["mean"] + sum(last) / len(last) + 0.1 * float(memory["seen"][0]) / next(numbers)
        calls = step.calls  # pyright: ignore[reportFunctionMemberAccess]
        return cross_entropy(outputs * (1 + shift), batch[1]) / calls

    return step


class Relative:
    """A loss, relative to its mean in earlier calls."""

    def __init__(self) -> None:
        self.mean: float | None = None

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = cross_entropy(outputs, targets)
        self.mean = loss.item() if self.mean is None else 0.8 * self.mean + 0.2 * loss.item()
        return loss / self.mean


class Recurrent(nn.Module):
    """It goes on with the hidden state of the last batch, and draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.generator = tanh(), torch.Generator().manual_seed(3)
        self.hidden: torch.Tensor | None = None
        self.bank, self.table = deque[torch.Tensor](maxlen=2), torch.zeros(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(x.shape, generator=self.generator, dtype=torch.float64)
        hidden = x.new_zeros(6) if self.hidden is None else self.hidden
        outputs = self.layers(x + 0.3 * noise.to(x) + hidden)
        self.hidden = (0.5 * hidden + x.mean(0)).detach()
        self.bank.append(outputs.detach().mean(0))
        self.table[0] += 1  # in place
        return outputs + sum(self.bank) / len(self.bank) + 0.1 * self.table.to(x)


class Merged(nn.Linear):
    """It adds a product of low rank (LoRA) to its weight in evaluation mode, and takes it off in training mode."""

    def __init__(self) -> None:
        super().__init__(6, 2)
        self.a, self.b, self.merged = nn.Parameter(torch.randn(1, 6)), nn.Parameter(torch.randn(2, 1)), False
        self.weight.requires_grad_(False)

    def train(self, mode: bool = True) -> Merged:
        super().train(mode)
        if mode == self.merged:
            self.weight.data += (-1 if mode else 1) * self.b @ self.a
            self.merged = not mode
        return self

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) + (0 if self.merged else input @ self.a.T @ self.b.T)


def raises_weight(state: Any) -> None:
    global weight
    weight += 0.1


def of_weight(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(outputs, targets) + weight * outputs.square().mean()


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "counter": lambda: {"training_step": of_counter},
    "teacher": lambda: {"training_step": of_teacher},
    "generator": lambda: {"training_step": of_generator},
    "closure": lambda: {"training_step": of_closure()},
    "object": lambda: {"loss": Relative()},
    "network": lambda: {"model": Recurrent},
    "merged": lambda: {"model": Merged},
    "hook": lambda: {"loss": of_weight, "after_step": raises_weight},
}
"""Functions that make the parts of a user."""


def fresh(name: str) -> dict[str, Any]:
    """Return the parts of a case, as a process has them that has just begun."""
    reset()
    return CASES[name]()


class Margin(nn.Module):
    """A cross-entropy with a margin, which a hook raises."""

    margin = 0.0

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return cross_entropy(outputs - self.margin * nn.functional.one_hot(targets, 2).to(outputs), targets)


network, margin = made_once(tanh), Margin()
outside = nn.Parameter(torch.zeros(()))


def step_with_penalty(model: nn.Module, batch: Any) -> torch.Tensor:
    return cross_entropy(model(batch[0]), batch[1]) + penalty(model)


def step_with_attributes(model: Any, batch: Any) -> torch.Tensor:
    return cross_entropy(model(batch[0]), batch[1]) + 0.05 * model[0].weight.norm() * model[2].bias.abs().sum()


def with_penalty(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A loss with a penalty of the network, which it knows as the object that is given."""
    return cross_entropy(outputs, targets) + penalty(network)


def penalty(model: nn.Module) -> torch.Tensor:
    parts = [each.abs().sum() + each[0].norm() * each.norm().item() for each in model.parameters()]
    return 0.05 * torch.stack(parts).sum()


def clips_and_raises_margin(state: Any) -> None:
    margin.margin += 0.1
    with torch.no_grad():
        for each in network.parameters():
            each.clamp_(-0.3, 0.3)


def scaled_outside(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A loss with a parameter that is no part of the network."""
    return cross_entropy(outputs, targets) * torch.exp(-outside) + outside


def judged(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A loss with another network, which is not trained, and yet not frozen."""
    return cross_entropy(outputs, targets) + judge(outputs).square().mean()


def halves_decay(state: Any) -> None:
    for group in state.optimizer.param_groups:
        group["weight_decay"] *= 0.5


class Harder(torch.utils.data.Dataset):
    """Samples that a hook makes larger."""

    def __init__(self, inputs: torch.Tensor, targets: torch.Tensor):
        self.inputs, self.targets, self.scale = inputs, targets, 1.0

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[index] * self.scale, self.targets[index]
