"""The optimizers of `torch.optim`, with typed and validated options."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch

from runner.config.errors import check, check_range


@dataclass
class Optimizer(ABC):
    """The options from which `build` creates a `torch.optim.Optimizer` for a model's trainable parameters.

    Args:
        lr: the base learning rate, which the schedule multiplies by a factor.
        weight_decay: L2 penalty (sgd, adam) or decoupled weight decay (adamw).
        fused: whether to use torch's fused kernels, which are faster and give the same results up to rounding.
    """

    lr: float
    weight_decay: float = 0.0
    fused: bool = True

    def __post_init__(self) -> None:
        # A larger value is a typo: with it, every optimizer here diverges within a few steps.
        check_range(self, "lr", above=0, most=1000)
        check_range(self, "weight_decay", least=0, most=1000)

    @abstractmethod
    def build(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """Return an optimizer for the parameters of `model` that require gradients."""

    def _shared(self) -> dict[str, Any]:
        return {"lr": self.lr, "weight_decay": self.weight_decay, "fused": self.fused}


def trainable(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return the parameters of `model` that require gradients, which excludes those of a frozen target network."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


@dataclass
class SGD(Optimizer):
    """Stochastic gradient descent with momentum (`torch.optim.SGD`).

    Args:
        momentum: momentum factor.
        nesterov: whether to use Nesterov momentum, which requires momentum > 0.
    """

    momentum: float = 0.9
    nesterov: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "momentum", least=0, most=1)
        why = "Nesterov momentum requires optimizer.momentum > 0"
        check(not self.nesterov or self.momentum > 0, "nesterov", True, why, "set optimizer.momentum=0.9")

    def build(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        parameters = trainable(model)
        # For DTensor parameters torch implements fused Adam, but not fused SGD.
        options = self._shared() | {"fused": self.fused and not any(map(_is_dtensor, parameters))}
        optimizer = torch.optim.SGD(parameters, **options, momentum=self.momentum, nesterov=self.nesterov)
        if self.momentum > 0:
            # The fused step allocates the buffers itself, but leaves them uninitialized if loss scaling skips the
            # first update. Starting from zeros, the updates are the same.
            for parameter in parameters:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        return optimizer


def _is_dtensor(parameter: torch.Tensor) -> bool:
    """Return whether `parameter` is a `DTensor`, without the slow import of `torch.distributed.tensor`."""
    return hasattr(parameter, "device_mesh")


@dataclass
class Adam(Optimizer):
    """Adam (Kingma and Ba, 2015; `torch.optim.Adam`).

    Args:
        beta1: decay rate of the running average of the gradient.
        beta2: decay rate of the running average of the squared gradient.
        eps: term added to the denominator for numerical stability.
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
