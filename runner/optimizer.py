"""Optimizers: torch's own, with their options typed and checked."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch

from runner.config.errors import check, check_range


@dataclass
class Optimizer(ABC):
    """Builds a `torch.optim.Optimizer` over a model's trainable parameters.

    Args:
        lr: the learning rate that the schedule scales.
        weight_decay: L2 penalty (sgd, adam) or decoupled decay (adamw).
        fused: one kernel for all parameters, on the devices that have it: the same numbers up to rounding, faster.
    """

    lr: float
    weight_decay: float = 0.0
    fused: bool = True

    def __post_init__(self) -> None:
        # Above 1000 every optimizer here diverges in its first steps: a slip of the finger, not an experiment.
        check_range(self, "lr", above=0, most=1000)
        check_range(self, "weight_decay", least=0, most=1000)

    @abstractmethod
    def build(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """The optimizer of the parameters of `model` that require gradients."""

    def _shared(self) -> dict[str, Any]:
        return {"lr": self.lr, "weight_decay": self.weight_decay, "fused": self.fused}


def trainable(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """The parameters that are trained: a frozen child (a target network) is left alone."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


@dataclass
class SGD(Optimizer):
    """Stochastic gradient descent with momentum (`torch.optim.SGD`).

    Args:
        momentum: how much of the last update is kept.
        nesterov: look ahead by the momentum (needs momentum > 0).
    """

    momentum: float = 0.9
    nesterov: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "momentum", least=0, most=1)
        needs = "Nesterov's method needs a momentum > 0"
        check(not self.nesterov or self.momentum > 0, "nesterov", True, needs, "set optimizer.momentum=0.9")

    def build(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        parameters = trainable(model)
        # torch has fused Adam for parameters that are cut over processes, but no fused SGD.
        options = self._shared() | {"fused": self.fused and not any(map(_is_cut, parameters))}
        optimizer = torch.optim.SGD(parameters, **options, momentum=self.momentum, nesterov=self.nesterov)
        if self.momentum > 0:
            # Torch's fused step makes these itself, but leaves whatever was in the memory when loss scaling skips the
            # very first update. From zeros the updates are the same.
            for parameter in parameters:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        return optimizer


def _is_cut(parameter: torch.Tensor) -> bool:
    """Whether `parameter` is a `DTensor`; without loading what knows them, where nobody has made one."""
    return hasattr(parameter, "device_mesh")


@dataclass
class Adam(Optimizer):
    """Adam (Kingma and Ba, 2015; `torch.optim.Adam`).

    Args:
        beta1: decay of the mean gradient.
        beta2: decay of the mean squared gradient.
        eps: added to the denominator.
    """

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        for beta in ("beta1", "beta2"):
            check_range(self, beta, least=0, below=1)
        check_range(self, "eps", above=0, most=1)

    def build(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(trainable(model), **self._shared(), betas=(self.beta1, self.beta2), eps=self.eps)


@dataclass
class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019; `torch.optim.AdamW`)."""

    def build(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(trainable(model), **self._shared(), betas=(self.beta1, self.beta2), eps=self.eps)
