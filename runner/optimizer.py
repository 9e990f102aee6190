"""The optimizers of `torch.optim`, with typed and validated options."""

from __future__ import annotations

import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, ClassVar, NamedTuple

import torch

from runner.config import user_code
from runner.config.errors import ConfigError, check, did_you_mean, errors_under
from runner.config.limits import Fraction, Range
from runner.config.name_patterns import matching, names_to_match
from runner.config.options import option_contents
from runner.config.schema import checked_values, load_class, option_fields, typed_values
from runner.models.depth import Layers, layers_of
from runner.optimizer_trial import check_of_user, needs_of_user
from runner.schedule import Schedule, of_option
from runner.torch_optimizer import (
    OF_ALL,
    arguments_of,
    can_fuse,
    check_accepted,
    is_of_torch,
    joined,
    of_torch,
    schema_of,
)

log = logging.getLogger(__name__)

RATE = Range(above=0, most=1000)  # a larger value is a typo: with it, every optimizer here diverges within a few steps
DECAY = Range(least=0, most=1000)


class ParameterGroup(NamedTuple):
    """Parameters that one class of `torch.optim` updates, with the same options.

    `name` is the pattern or the block that determines the learning rate; empty for the base rate, whose group alone may
    have no parameters. `kind` is the name of the class, `fuses` whether it may be fused, and `options` its arguments.
    `schedule` is the pattern of a group with a schedule of its own.
    """

    name: str
    kind: str
    fuses: bool
    options: dict[str, Any]
    schedule: str
    parameters: list[str]


@dataclass
class Optimizer(ABC):
    """The options from which `build` creates a `torch.optim.Optimizer` for a model's trainable parameters.

    They are explained in `conf/optimizer/_optimizer.yaml`. The first pattern in `groups` that matches a parameter
    decides on its options, before `layer_decay` and `decay_norms`.
    """

    lr: Annotated[float, RATE]
    weight_decay: Annotated[float, DECAY] = 0.0
    options: dict[str, Any] | None = None  # not {}: Hydra would refuse to override it
    fused: bool = True
    groups: dict[str, Any] | None = None
    layer_decay: Annotated[float, Range(above=0, most=1)] = 1.0
    decay_norms: bool = True

    fuses: ClassVar[bool] = True
    """Whether fused kernels of torch may be used."""

    def __post_init__(self) -> None:
        self._further()
        for pattern in self.groups or ():
            self.of_group(pattern)
        self.schedules()

    @abstractmethod
    def kinds(self) -> tuple[str, ...]:
        """Return the names of the classes of `torch.optim` that update the parameters."""

    def kind_of(self, parameter: torch.Tensor) -> str:
        """Return the one of `kinds` that updates `parameter`."""
        return self.kinds()[0]

    def arguments(self, kind: str) -> dict[str, Any]:
        """Return the arguments of the class `kind` of `torch.optim`, but for those that choose its implementation."""
        options = {field.name: getattr(self, field.name) for field in fields(self)}
        if "beta1" in options:
            options["betas"] = (options["beta1"], options["beta2"])
        known = {*arguments_of(kind)} - {"fused", "foreach"}
        return {name: value for name, value in (options | self._further()).items() if name in known}

    def needs(self) -> frozenset[str]:
        """Return which of `ALL` and `SAME` of `optimizer_trial` the updates need."""
        return frozenset()

    def key_that_needs(self, need: str) -> str:
        """Return the key of what needs it, in this optimizer or in a group; empty if nothing does."""
        parts = {"optimizer": self} | {f"optimizer.groups.{name}": self.of_group(name) for name in self.groups or ()}
        return next((key for key, part in parts.items() if need in part.needs()), "")

    def of_group(self, pattern: str) -> Optimizer:
        """Return the options of the group `pattern`: what it sets, and otherwise those of this optimizer.

        If it names another `optimizer`, they are otherwise the defaults of that option.

        Raises:
            ConfigError: if there is no such option, or its value is not allowed.
        """
        key, given = f"groups.{pattern}", (self.groups or {})[pattern]
        check(isinstance(pattern, str), key, pattern, "it is read as a number", f"write {pattern}.*")
        why, remedy = "it is not a mapping of options", "for example {head: {lr: 0.01}}"
        check(isinstance(given, Mapping) and bool(given), key, given, why, remedy)
        with errors_under(key):
            given = {name: value for name, value in given.items() if name != "schedule"}
            part: Optimizer = replace(self, groups=None)
            named = {"name": given.pop("name")} if "name" in given else {}
            if (option := given.pop("optimizer", None)) is not None:
                known = option_contents("optimizer")
                of_torch_only = f"{{optimizer: torch, name: {option}}}" if hasattr(torch.optim, str(option)) else ""
                why, remedy = "there is no such optimizer;", of_torch_only or did_you_mean(str(option), known)
                check(option in known, "optimizer", option, why, remedy)
                cls: Any = load_class(known[option]["_target_"], Optimizer)
                values = {name: value for name, value in known[option].items() if name != "_target_"}
                part = cls(**typed_values(cls, values | named | {"fused": self.fused, "decay_norms": self.decay_norms}))
            elif named:
                why = f"{type(self).__name__} has no such option"
                remedy = "{optimizer: torch, name: Adagrad}, for example"
                check("name" in option_fields(type(self)), "name", named["name"], why, remedy)
                part = replace(part, options=None, **checked_values(type(part), named))
            for name in sorted(given.keys() & {*OF_ALL}):
                raise ConfigError(name, given[name], "it is an option of the whole optimizer", f"optimizer.{name}=…")
            options = option_fields(type(part))
            if "betas" in given and "beta1" in options:
                betas = given.pop("betas")
                is_pair = isinstance(betas, Sequence) and not isinstance(betas, str) and len(betas) == 2
                check(is_pair, "betas", betas, "it needs two numbers", "betas: [0.9, 0.95], or beta1 and beta2")
                why = "beta1 or beta2 is given, too"
                check(not {"beta1", "beta2"} & {*given}, "betas", betas, why, "leave one of them out")
                given |= {"beta1": betas[0], "beta2": betas[1]}
            values = checked_values(schema_of(type(part), part.kinds()), given)
            own = {name: value for name, value in values.items() if name in options}
            further = {name: given[name] for name in values.keys() - own.keys()}
            own["options"] = {**(part.options or {}), **own.get("options", {}), **further} or None
            return replace(part, **own)

    def schedules(self) -> dict[str, Schedule]:
        """Return the schedules of groups that have their own, by pattern.

        Raises:
            ConfigError: if one is not valid.
        """
        found = {}
        for pattern, given in (self.groups or {}).items():
            if "schedule" in given:
                with errors_under(f"groups.{pattern}"):
                    found[pattern] = of_option(given["schedule"])
        return found

    def _further(self) -> dict[str, Any]:
        """Return `options`, as the types that they have in `torch.optim`."""
        if not self.options:
            return {}
        with errors_under("options"):
            return checked_values(schema_of(type(self), self.kinds(), False), self.options)

    def build(self, model: torch.nn.Module, groups: Sequence[ParameterGroup] | None = None) -> torch.optim.Optimizer:
        """Return an optimizer for the parameters of `model` that require gradients.

        `groups` is what `parameter_groups` returns for the whole model, if `model` is the part of it that this rank
        holds. There is one optimizer of torch for each of their kinds; several are joined.
        """
        held, found = dict(model.named_parameters()), dict[tuple[str, bool], list[dict[str, Any]]]()
        for group in self.parameter_groups(model) if groups is None else groups:
            parameters = [held[name] for name in group.parameters if name in held]
            options = {"params": parameters, "name": group.name, "schedule": group.schedule, **group.options}
            found.setdefault((group.kind, group.fuses), []).append(options)
        sparse = {
            p for module in model.modules() if getattr(module, "sparse", None) is True for p in module.parameters()
        }
        fused = self.fused and all(map(can_fuse, trainable(model))) and sparse.isdisjoint(trainable(model))
        return joined([of_torch(*key, each, self.fused, fused) for key, each in found.items()])

    def parameter_groups(self, model: torch.nn.Module) -> list[ParameterGroup]:
        """Return the groups of the trainable parameters of the whole model, first that of the base learning rate.

        Raises `ConfigError` if a pattern matches no trainable parameter, or only parameters of an earlier pattern, if
        torch refuses the options of a group, or if `layer_decay` is below 1 and the network has no layers in an order.
        """
        parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        has_any = next(model.parameters(), None) is not None
        why = "none of its parameters is trained" if has_any else "it has no parameters, and there is nothing to train"
        remedy = "leave some trainable: requires_grad, model.unfreeze=[…]" if has_any else "give a network with some"
        check(bool(parameters), "model", type(model).__name__, why, remedy)
        pattern_of = self._patterns(model, parameters)
        layers = layers_of(model) if self.layer_decay < 1 else Layers([], {})
        remedy = "a method blocks(), or 'optimizer.groups={PATTERN: {lr: 0.01}}'"
        check(not layers.why, "optimizer.layer_decay", self.layer_decay, layers.why, remedy)
        last = len(layers.names) - 1
        if last > 0:
            text = "optimizer.layer_decay: %d layers, from %s (optimizer.lr × %.3g) to %s"
            log.info(text, last + 1, layers.names[0], self.layer_decay**last, layers.names[last])
        parts = {"": self} | {pattern: self.of_group(pattern) for pattern in self.groups or ()}
        groups: dict[str, ParameterGroup] = {}
        for name, parameter in [("", torch.empty(1, 1)), *parameters.items()]:
            pattern = pattern_of.get(name, "")
            part, given = parts[pattern], (self.groups or {}).get(pattern, {})
            has_rate = bool({"lr", "optimizer"} & {*given})
            above = last - layers.index_of[name] if layers.names and name and not has_rate else 0
            kind = part.kind_of(parameter)
            options = part.arguments(kind)
            options["lr"] *= self.layer_decay**above
            if not (self.decay_norms or parameter.dim() > 1 or "weight_decay" in given or not name):
                options |= {"weight_decay": 0.0} if "weight_decay" in options else {}
            schedule = pattern if "schedule" in given else ""
            names = [pattern] if has_rate or schedule else []
            label = "/".join([*names, layers.names[last - above]] if above else names)
            key = repr((label, kind, part.fuses, options))
            if key not in groups:
                check_accepted(kind, options, f"optimizer.groups.{pattern}" if pattern else "optimizer.options")
                groups[key] = ParameterGroup(label, kind, part.fuses, options, schedule, [])
            groups[key].parameters.extend([name] if name else [])
        return [*groups.values()]

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


def trainable(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


@dataclass
class SGD(Optimizer):
    """Stochastic gradient descent with momentum (`torch.optim.SGD`)."""

    momentum: Fraction = 0.9
    nesterov: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        why = "Nesterov momentum requires optimizer.momentum > 0"
        check(self.momentum > 0 or not self.nesterov, "nesterov", True, why, "set optimizer.momentum=0.9")

    def kinds(self) -> tuple[str, ...]:
        return ("SGD",)


@dataclass
class Adam(Optimizer):
    """Adam (Kingma and Ba, 2015; `torch.optim.Adam`)."""

    beta1: Annotated[float, Range(least=0, below=1)] = 0.9
    beta2: Annotated[float, Range(least=0, below=1)] = 0.999
    eps: Annotated[float, Range(above=0, most=1)] = 1e-8

    def kinds(self) -> tuple[str, ...]:
        return ("Adam",)


@dataclass
class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019; `torch.optim.AdamW`)."""

    def kinds(self) -> tuple[str, ...]:
        return ("AdamW",)


_ELSEWHERE = ("Optimizer", "LBFGS", "SparseAdam", "Muon")
"""The base class; what needs a closure, or sparse gradients; and what takes matrices alone."""


@dataclass
class Named(Optimizer):
    """Any optimizer of `torch.optim` by its `name`."""

    name: str = "Adagrad"

    fuses: ClassVar[bool] = False

    def __post_init__(self) -> None:
        classes = inspect.getmembers(torch.optim, inspect.isclass)
        known = [n for n, c in classes if issubclass(c, torch.optim.Optimizer) and n not in _ELSEWHERE]
        is_own = not is_of_torch(self.name) and callable(user_code.find(self.name))
        why = "torch.optim has no such optimizer for a network, nor the file of workload=…;"
        check(self.name in known or is_own, "name", self.name, why, did_you_mean(self.name, known))
        why, remedy = "it has no argument lr", "a class, or a function, of (params, lr, …)"
        check("lr" in arguments_of(self.name), "name", self.name, why, remedy)
        has_decay = not self.weight_decay or "weight_decay" in arguments_of(self.name)
        why, remedy = f"{self.name} has no weight decay", "optimizer.weight_decay=0"
        check(has_decay, "weight_decay", self.weight_decay, why, remedy)
        super().__post_init__()
        if is_own:
            check_of_user(self.name, self.arguments(self.name))

    def needs(self) -> frozenset[str]:
        return super().needs() if is_of_torch(self.name) else needs_of_user(self.name, self.arguments(self.name))

    def kinds(self) -> tuple[str, ...]:
        return (self.name,)


@dataclass
class Muon(AdamW):
    """Muon (Jordan et al., 2024; `torch.optim.Muon`) for matrices, and AdamW for all other parameters.

    Matrices are real parameters with two dimensions: the weights of linear layers, but not those of convolutions. Their
    updates are scaled to the size of AdamW's (Liu et al., Muon is Scalable for LLM Training, 2025), so that both share
    one learning rate. Updates are orthogonalized in bfloat16, by `ns_steps` Newton-Schulz iterations: if the gradients
    in two modes differ by float32 rounding, the updates may differ by bfloat16 rounding.
    """

    momentum: Fraction = 0.95
    nesterov: bool = True
    ns_steps: Annotated[int, Range(least=1, most=99)] = 5

    def kinds(self) -> tuple[str, ...]:
        return ("Muon", "AdamW")

    def kind_of(self, parameter: torch.Tensor) -> str:
        return "Muon" if parameter.dim() == 2 and not parameter.is_complex() else "AdamW"

    def arguments(self, kind: str) -> dict[str, Any]:
        found = super().arguments(kind)
        if kind == "Muon":
            del found["eps"]  # that of AdamW
            found = {"adjust_lr_fn": "match_rms_adamw"} | found
        return found
