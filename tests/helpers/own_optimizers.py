"""A file of a user with optimizers: some as packages have them, others with which no run could train."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from helpers.strange_networks import numbers, tanh

model = tanh


def data() -> Any:
    return numbers(), numbers()


class Base(Optimizer):
    def __init__(self, params: Any, lr: float = 0.1, momentum: float = 0.5, weight_decay: float = 0.0):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(group, parameter, self.state[parameter])

    def update(self, group: dict[str, Any], parameter: torch.Tensor, state: dict[str, Any]) -> None:
        parameter.add_(parameter.grad * 1.0, alpha=-group["lr"])


class Slows(Base):
    """Its steps become smaller: it counts them, in a number and in a tensor of whole numbers."""

    def update(self, group: dict[str, Any], parameter: torch.Tensor, state: dict[str, Any]) -> None:
        if not state:
            state |= {"moment": torch.zeros_like(parameter), "count": 0, "seen": torch.tensor(2**53 + 1)}
        state["count"] += 1
        state["seen"] += 1
        state["moment"].mul_(group["momentum"]).add_(parameter.grad)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        share = 1 + float(state["seen"] - 2**53) + state["count"]
        parameter.add_(state["moment"] / share, alpha=-group["lr"])


class Lookahead(Slows):
    """Every third step, which its groups count, slow weights are a mean of them and the fast ones."""

    def __init__(self, params: Any, lr: float = 0.1):
        super().__init__(params, lr)
        for group in self.param_groups:
            group["count"] = 0

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            group["count"] += 1
        super().step()

    def update(self, group: dict[str, Any], parameter: torch.Tensor, state: dict[str, Any]) -> None:
        slow = state.pop("slow", None)
        super().update(group, parameter, state)
        state["slow"] = parameter.clone() if slow is None else slow
        if group["count"] % 3 == 0:
            parameter.data = state["slow"].lerp_(parameter, 0.5).clone()


class Normalized(Base):
    """The length of each update is that of the parameter, as in LAMB."""

    def update(self, group: dict[str, Any], parameter: torch.Tensor, state: dict[str, Any]) -> None:
        gradient: Any = parameter.grad
        parameter.add_(gradient * (parameter.norm() / gradient.norm()), alpha=-group["lr"])


class OfAll(Base):
    """The length of all updates together is the learning rate."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        parameters = [each for group in self.param_groups for each in group["params"]]
        norm = torch.stack([each.grad.norm() for each in parameters]).norm()
        for each in parameters:
            each.add_(each.grad / norm, alpha=-self.param_groups[0]["lr"])


class Adapts(Base):
    """A sum over all parameters, in its groups, is the learning rate once it is large enough."""

    def __init__(self, params: Any, lr: float = 0.1):
        super().__init__(params, lr)
        self.param_groups[0]["sum"] = 0.0

    def update(self, group: dict[str, Any], parameter: torch.Tensor, state: dict[str, Any]) -> None:
        gradient: Any = parameter.grad
        group["sum"] += float(gradient.abs().sum())
        parameter.add_(gradient * max(1.0, group["sum"] / 5), alpha=-group["lr"])


class Langevin(Base):
    def update(self, group: dict[str, Any], parameter: torch.Tensor, state: dict[str, Any]) -> None:
        parameter.add_(parameter.grad + torch.randn_like(parameter), alpha=-group["lr"])


class Remembers(Base):
    count = 0

    def update(self, group: dict[str, Any], parameter: torch.Tensor, state: dict[str, Any]) -> None:
        self.count += 1
        parameter.add_(parameter.grad / self.count, alpha=-group["lr"])


class OwnRate(Base):
    def update(self, group: dict[str, Any], parameter: torch.Tensor, state: dict[str, Any]) -> None:
        parameter.add_(parameter.grad * 1.0, alpha=-0.1)


class NeedsClosure(Base):
    def step(self, closure: Callable[[], torch.Tensor]) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        closure()


class WithoutRate(Optimizer):
    def __init__(self, params: Any):
        super().__init__(params, {})


def twice(params: Any, lr: float) -> Optimizer:
    return torch.optim.SGD(params, 2 * lr)


def network(params: Any, lr: float) -> Any:
    return nn.Linear(1, 1)


def decayed(params: Any, lr: float) -> Optimizer:
    return torch.optim.AdamW(params, lr, weight_decay=0.3)
