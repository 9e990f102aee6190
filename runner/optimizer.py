"""The optimizers of `torch.optim`, with typed and validated options."""

from __future__ import annotations

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar, NamedTuple

import torch

from runner.config.errors import ABSENT, ConfigError, check, did_you_mean, see_comments
from runner.config.limits import Fraction, Range
from runner.config.name_patterns import matching, names_to_match
from runner.models.blocks import block_indices, blocks_of

RATE = Range(above=0, most=1000)  # a larger value is a typo: with it, every optimizer here diverges within a few steps
DECAY = Range(least=0, most=1000)


class ParameterGroup(NamedTuple):
    """Parameters with the same learning rate and weight decay.

    `name` is the pattern or the block that determines the rate; empty for the base learning rate, whose group alone may
    have no parameters.
    """

    name: str
    lr: float
    weight_decay: float
    parameters: list[str]


@dataclass
class Optimizer(ABC):
    """The options from which `build` creates a `torch.optim.Optimizer` for a model's trainable parameters.

    They are explained in `conf/optimizer/_optimizer.yaml`. The first pattern in `groups` that matches a parameter
    decides on its `lr` and `weight_decay`, before `layer_decay` and `decay_norms`.
    """

    lr: Annotated[float, RATE]
    weight_decay: Annotated[float, DECAY] = 0.0
    fused: bool = True
    groups: dict[str, Any] | None = None  # not {}: Hydra would refuse to override it
    layer_decay: Annotated[float, Range(above=0, most=1)] = 1.0
    decay_norms: bool = True

    needs_whole_parameters: ClassVar[bool] = False
    """Whether parallel modes that shard parameters are refused."""

    def __post_init__(self) -> None:
        for pattern, options in (self.groups or {}).items():
            key = f"groups.{pattern}"
            why = "it is not a mapping with lr or weight_decay"
            check(isinstance(options, Mapping) and bool(options), key, options, why, "for example {head: {lr: 0.01}}")
            for name, value in options.items():
                if name not in ("lr", "weight_decay"):
                    remedy = did_you_mean(name, ("lr", "weight_decay"))
                    raise ConfigError(f"{key}.{name}", ABSENT, "a group has no such option;", remedy)
                is_number, limits = type(value) in (int, float), RATE if name == "lr" else DECAY
                why = f"it must be a finite number {limits}"
                check(is_number and value in limits, f"{key}.{name}", value, why, see_comments(self))

    def build(self, model: torch.nn.Module, groups: Sequence[ParameterGroup] | None = None) -> torch.optim.Optimizer:
        """Return an optimizer for the parameters of `model` that require gradients.

        `groups` is what `parameter_groups` returns for the whole model, if `model` is the part of it that this rank
        holds.
        """
        held, found = dict(model.named_parameters()), []
        for group in self.parameter_groups(model) if groups is None else groups:
            parameters = [held[name] for name in group.parameters if name in held]
            options = {"lr": group.lr, "weight_decay": group.weight_decay, "name": group.name}
            found.append({"params": parameters} | options)
        sparse = {
            p for module in model.modules() if getattr(module, "sparse", None) is True for p in module.parameters()
        }
        fused = self.fused and all(map(can_fuse, trainable(model))) and sparse.isdisjoint(trainable(model))
        return self.build_from_groups(found, fused)

    @abstractmethod
    def build_from_groups(self, groups: list[dict[str, Any]], fused: bool) -> torch.optim.Optimizer:
        """Return an optimizer for `groups`, as torch takes them, each with its `lr` and `weight_decay`.

        `fused` says whether fused kernels are asked for, and can update all of the parameters.
        """

    def parameter_groups(self, model: torch.nn.Module) -> list[ParameterGroup]:
        """Return the groups of the trainable parameters of the whole model, first that of the base learning rate.

        Raises `ConfigError` if a pattern matches no trainable parameter, or only parameters of an earlier pattern, or
        if `layer_decay` is below 1 and the network lists no blocks.
        """
        parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        has_any = next(model.parameters(), None) is not None
        why = "none of its parameters is trained" if has_any else "it has no parameters, and there is nothing to train"
        remedy = "leave some trainable: requires_grad, model.unfreeze=[…]" if has_any else "give a network with some"
        check(bool(parameters), "model", type(model).__name__, why, remedy)
        pattern_of = self._patterns(model, parameters)
        blocks, block_of = [name for name, _ in blocks_of(model)], block_indices(model)
        why = f"{type(model).__name__} has no blocks() from which the depth of a parameter could be told"
        remedy = "'optimizer.groups={PATTERN: {lr: 0.01}}'"
        check(bool(blocks) or self.layer_decay == 1, "optimizer.layer_decay", self.layer_decay, why, remedy)
        groups: dict[tuple[str, float, float], list[str]] = {("", self.lr, self.weight_decay): []}
        for name, parameter in parameters.items():
            pattern = pattern_of.get(name, "")
            options = (self.groups or {}).get(pattern, {})
            above = len(blocks) - 1 - block_of[name] if self.layer_decay < 1 else 0
            label = pattern if "lr" in options else blocks[block_of[name]] if above else ""
            lr = options.get("lr", self.lr * self.layer_decay**above)
            decays = self.decay_norms or parameter.dim() > 1
            weight_decay = options.get("weight_decay", self.weight_decay if decays else 0.0)
            groups.setdefault((label, lr, weight_decay), []).append(name)
        return [ParameterGroup(*key, names) for key, names in groups.items()]

    def _patterns(self, model: torch.nn.Module, parameters: Mapping[str, Any]) -> dict[str, str]:
        """Return the first pattern in `groups` that matches a trained parameter, by its name."""
        found: dict[str, str] = {}
        names = names_to_match(model) if self.groups else {}
        trained = {name: each for name, each in names.items() if name in parameters}
        for pattern in self.groups or ():
            matched = matching("optimizer.groups", pattern, trained, "trained parameter")
            new = [name for name in matched if name not in found]
            why = "all parameters that it matches belong to the patterns before it"
            check(bool(new), "optimizer.groups", pattern, why, "write it before them")
            found |= dict.fromkeys(new, pattern)
        return found

    def _arguments(self, cls: type[torch.optim.Optimizer], fused: bool) -> dict[str, Any]:
        """Return the arguments of `cls`, a class of `torch.optim`: those of this class's fields that it has."""
        options = {field.name: getattr(self, field.name) for field in fields(self)}
        if "beta1" in options:
            options["betas"] = (options["beta1"], options["beta2"])
        known = inspect.signature(cls).parameters
        options["fused"] = fused and "fused" in known
        # Each operation is one kernel for many parameters; None is torch's choice.
        options["foreach"] = (self.fused and not options["fused"]) or None
        return {name: value for name, value in options.items() if name in known}


def learning_rates(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Return a dict from TensorBoard tag to learning rate: `lr`, and `lr/NAME` for groups with rates of their own."""
    rates: dict[str, float] = {}
    for group in optimizer.param_groups:
        name = group.get("name", "")
        rates.setdefault(f"lr/{name}" if name else "lr", float(group["lr"]))
    return rates


def trainable(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def can_fuse(parameter: torch.Tensor) -> bool:
    """Return whether fused kernels can update `parameter`: they take real numbers, in memory without gaps."""
    local = getattr(parameter, "_local_tensor", parameter)  # of a DTensor
    if not parameter.is_floating_point() or parameter.layout != torch.strided:
        return False
    return torch.empty_like(local, device="meta").stride() == local.stride()


@dataclass
class SGD(Optimizer):
    """Stochastic gradient descent with momentum (`torch.optim.SGD`)."""

    momentum: Fraction = 0.9
    nesterov: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        why = "Nesterov momentum requires optimizer.momentum > 0"
        check(self.momentum > 0 or not self.nesterov, "nesterov", True, why, "set optimizer.momentum=0.9")

    def build_from_groups(self, groups: list[dict[str, Any]], fused: bool) -> torch.optim.Optimizer:
        parameters = [parameter for group in groups for parameter in group["params"]]
        # For DTensor parameters torch implements fused Adam, but not fused SGD; and foreach, but not by default.
        sharded = any(hasattr(parameter, "device_mesh") for parameter in parameters)
        optimizer = torch.optim.SGD(groups, **self._arguments(torch.optim.SGD, fused and not sharded))
        if self.momentum > 0:
            # The fused step allocates the buffers itself, but leaves them uninitialized if loss scaling skips the
            # first update. Starting from zeros, the updates are the same.
            for parameter in parameters:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        return optimizer


@dataclass
class Adam(Optimizer):
    """Adam (Kingma and Ba, 2015; `torch.optim.Adam`)."""

    beta1: Annotated[float, Range(least=0, below=1)] = 0.9
    beta2: Annotated[float, Range(least=0, below=1)] = 0.999
    eps: Annotated[float, Range(above=0, most=1)] = 1e-8

    def build_from_groups(self, groups: list[dict[str, Any]], fused: bool) -> torch.optim.Optimizer:
        return torch.optim.Adam(groups, **self._arguments(torch.optim.Adam, fused))


@dataclass
class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019; `torch.optim.AdamW`)."""

    def build_from_groups(self, groups: list[dict[str, Any]], fused: bool) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups, **self._arguments(torch.optim.AdamW, fused))


_ELSEWHERE = ("Optimizer", "LBFGS", "SparseAdam", "Muon")
"""The base class; what needs a closure, or sparse gradients; and what takes matrices alone."""


@dataclass
class Named(Optimizer):
    """Any optimizer of `torch.optim` by its `name`; `options` are further keyword arguments of its class."""

    name: str = "Adagrad"
    options: dict[str, Any] | None = None

    def build_from_groups(self, groups: list[dict[str, Any]], fused: bool) -> torch.optim.Optimizer:
        classes = inspect.getmembers(torch.optim, inspect.isclass)
        known = {n: c for n, c in classes if issubclass(c, torch.optim.Optimizer) and n not in _ELSEWHERE}
        why = "torch.optim has no such optimizer for a network;"
        check(self.name in known, "optimizer.name", self.name, why, did_you_mean(self.name, known))
        cls, options = known[self.name], self.options or {}
        if self.weight_decay and "weight_decay" not in inspect.signature(cls).parameters:
            why = f"{self.name} has no weight decay"
            raise ConfigError("optimizer.weight_decay", self.weight_decay, why, "optimizer.weight_decay=0")
        arguments = {key: value for key, value in self._arguments(cls, fused=False).items() if key != "fused"}
        try:
            return cls(groups, **arguments, **options)
        except (TypeError, ValueError) as error:
            why, remedy = f"{self.name} refuses it: {error}", "see its documentation in torch.optim"
            raise ConfigError("optimizer.options", self.options, why, remedy) from None


@dataclass
class Muon(AdamW):
    """Muon (Jordan et al., 2024; `torch.optim.Muon`) for matrices, and AdamW for all other parameters.

    Matrices are real parameters with two dimensions: the weights of linear layers, but not those of convolutions. Their
    updates are scaled to the size of AdamW's (Liu et al., Muon is Scalable for LLM Training, 2025), so that both share
    one learning rate. Updates are orthogonalized in bfloat16, by `ns_steps` Newton-Schulz iterations: if the gradients
    in two modes differ by float32 rounding, the updates may differ by bfloat16 rounding.
    """

    needs_whole_parameters: ClassVar[bool] = True

    momentum: Fraction = 0.95
    nesterov: bool = True
    ns_steps: Annotated[int, Range(least=1, most=99)] = 5

    def build_from_groups(self, groups: list[dict[str, Any]], fused: bool) -> torch.optim.Optimizer:
        def is_matrix(parameter: torch.Tensor) -> bool:
            return parameter.dim() == 2 and not parameter.is_complex()

        matrices, others = (
            [group | {"params": [p for p in group["params"] if is_matrix(p) == wanted]} for group in groups]
            for wanted in (True, False)
        )
        options = self._arguments(torch.optim.Muon, fused)
        del options["eps"]  # that of AdamW
        muon = torch.optim.Muon(matrices, **options, adjust_lr_fn="match_rms_adamw")
        return _joined_class()(muon, torch.optim.AdamW(others, **self._arguments(torch.optim.AdamW, fused)))


@functools.cache
def _joined_class() -> Any:
    """Return the class `Joined`; its base class would load torch on import."""

    class Joined(torch.optim.Optimizer):
        """Several optimizers of different parameters, with one list of groups and one state."""

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
