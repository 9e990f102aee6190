"""The optimizers of `torch.optim`, with typed and validated options."""

from __future__ import annotations

import functools
import shlex
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

from models.blocks import block_indices, blocks_of
from runner.config.errors import ABSENT, check, check_range, did_you_mean, see_comments
from runner.config.name_patterns import matching, names_to_match
from runner.system import fused_update
from runner.system.dtensor import is_dtensor

_LARGEST = 1000  # a larger value is a typo: with it, every optimizer here diverges within a few steps


class ParameterGroup(NamedTuple):
    """Parameters with the same learning rate and weight decay.

    Args:
        name: the pattern or the block that determines the learning rate; empty for the base learning rate.
        lr: the learning rate, which the schedule multiplies by a factor.
        weight_decay: as in `Optimizer`.
        parameters: names of the parameters. Only the group of the base learning rate may be empty.
    """

    name: str
    lr: float
    weight_decay: float
    parameters: list[str]


@dataclass
class Optimizer(ABC):
    """The options from which `build` creates a `torch.optim.Optimizer` for a model's trainable parameters.

    Args:
        lr: the base learning rate, which the schedule multiplies by a factor.
        weight_decay: L2 penalty (sgd, adam, rmsprop) or decoupled weight decay (adamw, muon). For nadam, it is an
            L2 penalty unless `decoupled_weight_decay` is true.
        fused: whether to use torch's fused kernels, which are faster and give the same results up to rounding.
        groups: a dict from a pattern of parameter names (see `runner.config.name_patterns`) to a dict with the options
            of the parameters that match the pattern: `lr`, `weight_decay`, or both. For example, `{head: {lr: 0.1}}`.
            If a parameter matches several patterns, only the first of these patterns applies. Null for no patterns.
        layer_decay: each block of the network has `layer_decay` times the learning rate of the next block (Clark et
            al., ELECTRA, 2020): the last block has the rate `lr`, the first block `lr·layer_decay^(num_blocks - 1)`. An
            `lr` in `groups` replaces this rate.
        decay_norms: whether `weight_decay` also applies to parameters with at most one dimension: all biases, and the
            weights of normalization layers. A `weight_decay` in `groups` applies to these parameters in any case.
    """

    lr: float
    weight_decay: float = 0.0
    fused: bool = True
    groups: dict[str, Any] | None = None  # not {}: Hydra would refuse to override it
    layer_decay: float = 1.0
    decay_norms: bool = True

    needs_whole_parameters: ClassVar[bool] = False
    """Whether an update needs the whole parameter. If so, parallel modes that shard parameters are refused."""

    def __post_init__(self) -> None:
        check_range(self, "lr", above=0, most=_LARGEST)
        check_range(self, "weight_decay", least=0, most=_LARGEST)
        check_range(self, "layer_decay", above=0, most=1)
        for pattern, options in (self.groups or {}).items():
            self._check_group(f"groups.{pattern}", options)

    def _check_group(self, key: str, options: Any) -> None:
        given = isinstance(options, Mapping) and len(options) > 0
        check(given, key, options, "it is not a mapping with lr or weight_decay", "for example {head: {lr: 0.01}}")
        for name, value in options.items():
            known = ("lr", "weight_decay")
            check(name in known, f"{key}.{name}", ABSENT, "a group has no such option;", did_you_mean(name, known))
            number = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= _LARGEST
            why = f"it must be a number from 0 to {_LARGEST}"
            check(number, f"{key}.{name}", value, why, see_comments(self))
            why = "with a learning rate of 0 they would not be trained"
            remedy = shlex.quote(f"model.freeze={[key.partition('.')[2]]}")
            check(name != "lr" or value > 0, f"{key}.lr", value, why, remedy)

    @abstractmethod
    def build(self, model: torch.nn.Module, groups: Sequence[ParameterGroup] | None = None) -> torch.optim.Optimizer:
        """Return an optimizer for the parameters of `model` that require gradients.

        Args:
            model: the model, or the part of it that this rank holds.
            groups: the parameter groups of the whole model, as `parameter_groups` returns them. None to compute them
                from `model`, which must then be the whole model.

        Raises:
            ConfigError: as `parameter_groups` does, if `groups` is None.
        """

    def parameter_groups(self, model: torch.nn.Module) -> list[ParameterGroup]:
        """Return the groups of the trainable parameters of `model`, which must be the whole model.

        The first group is always the group of the base learning rate. This group may have no parameters.

        Raises:
            ConfigError: if a pattern matches no trainable parameter, or only parameters that match an earlier pattern,
                or if `layer_decay` is below 1 and the network lists no blocks.
        """
        parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        pattern_of = self._patterns(model, parameters)
        blocks, block_of = [name for name, _ in blocks_of(model)], block_indices(model)
        why = f"{type(model).__name__} has no blocks() from which the depth of a parameter could be told"
        fits = bool(blocks) or self.layer_decay == 1
        check(fits, "optimizer.layer_decay", self.layer_decay, why, "'optimizer.groups={PATTERN: {lr: 0.01}}'")
        own = self.groups or {}
        groups: dict[tuple[str, float, float], list[str]] = {("", self.lr, self.weight_decay): []}
        for name, parameter in parameters.items():
            pattern = pattern_of.get(name, "")
            options = own.get(pattern, {})
            above = len(blocks) - 1 - block_of[name] if self.layer_decay < 1 else 0
            label = pattern if "lr" in options else blocks[block_of[name]] if above else ""
            lr = options.get("lr", self.lr * self.layer_decay**above)
            decays = self.decay_norms or parameter.dim() > 1
            weight_decay = options.get("weight_decay", self.weight_decay if decays else 0.0)
            groups.setdefault((label, lr, weight_decay), []).append(name)
        return [ParameterGroup(*key, names) for key, names in groups.items()]

    def _patterns(self, model: torch.nn.Module, parameters: Mapping[str, Any]) -> dict[str, str]:
        """Return a dict from the name of a parameter to the first pattern in `groups` that matches it.

        Parameters that no pattern matches are left out.

        Args:
            model: the whole model.
            parameters: the trained parameters of the model, by name.

        Raises:
            ConfigError: if a pattern matches no trained parameter, or only parameters that match an earlier pattern.
        """
        found: dict[str, str] = {}
        names = names_to_match(model) if self.groups else {}
        trained = {name: own for name, own in names.items() if name in parameters}
        frozen = {name: own for name, own in names.items() if name not in parameters}
        for pattern in self.groups or ():
            matched = matching("optimizer.groups", pattern, trained, frozen, "none of its parameters is trained")
            own = [name for name in matched if name not in found]
            why = "all parameters that it matches belong to the patterns before it"
            check(bool(own), "optimizer.groups", pattern, why, "write it before them")
            found |= dict.fromkeys(own, pattern)
        return found

    def _torch_groups(self, model: torch.nn.Module, groups: Sequence[ParameterGroup] | None) -> list[dict[str, Any]]:
        """Return parameter groups in the form of dicts that torch optimizers accept.

        Args:
            model: the model, or the part of it that this rank holds. Parameters that are not in it are left out.
            groups: the parameter groups of the whole model; None to compute them from `model`, which must then be the
                whole model.

        Raises:
            ConfigError: as `parameter_groups` does, if `groups` is None.
        """
        own = dict(model.named_parameters())
        return [
            {
                "params": [own[name] for name in group.parameters if name in own],
                "lr": group.lr,
                "weight_decay": group.weight_decay,
                "name": group.name,
            }
            for group in (self.parameter_groups(model) if groups is None else groups)
        ]

    def _shared(self) -> dict[str, Any]:
        return {"lr": self.lr, "weight_decay": self.weight_decay, "fused": self.fused}


def learning_rates(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Return a dict from TensorBoard tag to learning rate: `lr`, and `lr/NAME` for groups with rates of their own."""
    rates: dict[str, float] = {}
    for group in optimizer.param_groups:
        name = group.get("name", "")
        rates.setdefault(f"lr/{name}" if name else "lr", group["lr"])
    return rates


def trainable(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return the parameters of `model` that require gradients. Frozen parameters are left out."""
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

    def build(self, model: torch.nn.Module, groups: Sequence[ParameterGroup] | None = None) -> torch.optim.Optimizer:
        parameters, own = trainable(model), self._torch_groups(model, groups)
        # For DTensor parameters torch implements fused Adam, but not fused SGD; and foreach, but not by default.
        sharded = any(map(is_dtensor, parameters))
        options = self._shared() | {"fused": self.fused and not sharded, "foreach": (self.fused and sharded) or None}
        own = [group | {fused_update.FUSED_SHARDS: self.fused and sharded} for group in own]
        optimizer = torch.optim.SGD(own, **options, momentum=self.momentum, nesterov=self.nesterov)
        if self.momentum > 0:
            # The fused step allocates the buffers itself, but leaves them uninitialized if loss scaling skips the
            # first update. Starting from zeros, the updates are the same.
            for parameter in parameters:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        return optimizer


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

    def build(self, model: torch.nn.Module, groups: Sequence[ParameterGroup] | None = None) -> torch.optim.Optimizer:
        own = self._torch_groups(model, groups)
        return torch.optim.Adam(own, **self._shared(), betas=(self.beta1, self.beta2), eps=self.eps)


@dataclass
class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019; `torch.optim.AdamW`)."""

    def build(self, model: torch.nn.Module, groups: Sequence[ParameterGroup] | None = None) -> torch.optim.Optimizer:
        own = self._torch_groups(model, groups)
        return torch.optim.AdamW(own, **self._shared(), betas=(self.beta1, self.beta2), eps=self.eps)


@dataclass
class NAdam(Adam):
    """Adam with Nesterov momentum (Dozat, 2016; `torch.optim.NAdam`).

    torch has no fused kernel for NAdam. `fused` selects torch's `foreach` implementation instead, in which each
    operation is one kernel for many parameters.

    Args:
        momentum_decay: how fast the momentum rises to `beta1` at the beginning of the run.
        decoupled_weight_decay: whether weight decay is decoupled, as in adamw, instead of an L2 penalty.
    """

    momentum_decay: float = 0.004
    decoupled_weight_decay: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "momentum_decay", least=0, most=1)

    def build(self, model: torch.nn.Module, groups: Sequence[ParameterGroup] | None = None) -> torch.optim.Optimizer:
        return torch.optim.NAdam(
            self._torch_groups(model, groups),
            lr=self.lr,
            betas=(self.beta1, self.beta2),
            eps=self.eps,
            weight_decay=self.weight_decay,
            momentum_decay=self.momentum_decay,
            decoupled_weight_decay=self.decoupled_weight_decay,
            foreach=self.fused,
        )


@dataclass
class RMSprop(Optimizer):
    """RMSprop (Tieleman and Hinton, 2012; `torch.optim.RMSprop`), by default without momentum.

    torch has no fused kernel for RMSprop. `fused` selects torch's `foreach` implementation instead, in which each
    operation is one kernel for many parameters.

    Args:
        alpha: decay rate of the running average of the squared gradient.
        eps: term added to the denominator for numerical stability.
        momentum: momentum factor.
        centered: whether gradients are divided by an estimate of their standard deviation, instead of their root mean
            square.
    """

    alpha: float = 0.99
    eps: float = 1e-8
    momentum: float = 0.0
    centered: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "alpha", least=0, below=1)
        check_range(self, "eps", above=0, most=1)
        check_range(self, "momentum", least=0, most=1)

    def build(self, model: torch.nn.Module, groups: Sequence[ParameterGroup] | None = None) -> torch.optim.Optimizer:
        return torch.optim.RMSprop(
            self._torch_groups(model, groups),
            lr=self.lr,
            alpha=self.alpha,
            eps=self.eps,
            weight_decay=self.weight_decay,
            momentum=self.momentum,
            centered=self.centered,
            foreach=self.fused,
        )


@dataclass
class Muon(AdamW):
    """Muon (Jordan et al., 2024; `torch.optim.Muon`) for matrices, and AdamW for all other parameters.

    Matrices are parameters with two dimensions: the weights of linear layers, but not those of convolutions. Updates of
    matrices are scaled to the size of AdamW's updates (Liu et al., Muon is Scalable for LLM Training, 2025), so that
    Muon and AdamW share one learning rate and one weight decay. `fused` applies only to AdamW.

    Muon orthogonalizes its updates in bfloat16, which has 8 significant bits. If the gradients in two parallel
    modes differ only by float32 rounding, the Muon updates may still differ by bfloat16 rounding, which is larger.

    Args:
        momentum: momentum factor for matrices.
        nesterov: whether to use Nesterov momentum for matrices.
        ns_steps: number of Newton-Schulz iterations of each orthogonalization.
    """

    needs_whole_parameters: ClassVar[bool] = True

    momentum: float = 0.95
    nesterov: bool = True
    ns_steps: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "momentum", least=0, below=1)
        check_range(self, "ns_steps", least=1, most=99)

    def build(self, model: torch.nn.Module, groups: Sequence[ParameterGroup] | None = None) -> torch.optim.Optimizer:
        matrices: list[dict[str, Any]] = []
        others: list[dict[str, Any]] = []
        for group in self._torch_groups(model, groups):
            for chosen, is_matrix in ((matrices, True), (others, False)):
                own = [parameter for parameter in group["params"] if (parameter.dim() == 2) == is_matrix]
                chosen.append(group | {"params": own})
        muon = torch.optim.Muon(
            matrices,
            lr=self.lr,
            weight_decay=self.weight_decay,
            momentum=self.momentum,
            nesterov=self.nesterov,
            ns_steps=self.ns_steps,
            adjust_lr_fn="match_rms_adamw",
        )
        adamw = torch.optim.AdamW(others, **self._shared(), betas=(self.beta1, self.beta2), eps=self.eps)
        return _joined_class()(muon, adamw)


@functools.cache
def _joined_class() -> Any:
    """Return the class `Joined`. It is defined in a function, because its base class would load torch on import."""

    class Joined(torch.optim.Optimizer):
        """An optimizer made of several optimizers of different parameters, with one list of groups and one state."""

        def __init__(self, *parts: torch.optim.Optimizer):
            for number, part in enumerate(parts):
                for group in part.param_groups:
                    group["part"] = number
            super().__init__([group for part in parts for group in part.param_groups], {})
            self._parts = parts

        def __getstate__(self) -> dict[str, Any]:
            return super().__getstate__() | {"_parts": self._parts}  # for copies

        def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            for number, part in enumerate(self._parts):
                # In every step, because loading a state replaces them.
                part.state = self.state
                part.param_groups = [group for group in self.param_groups if group["part"] == number]
                part.step()

    return Joined
