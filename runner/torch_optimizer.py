"""Optimizers of `torch.optim`, one for each kind of parameter groups, and several of them as one."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import make_dataclass
from typing import Any

import torch

from runner.config import user_code
from runner.config.errors import ABSENT, check
from runner.config.schema import field_types, option_fields

OF_ALL = ("fused", "groups", "layer_decay", "decay_norms")
"""Options that a group cannot have by itself."""


_IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")
"""Arguments that say how a class computes: `optimizer.fused` and `compile=step` choose them."""

SCHEDULED = ("weight_decay", "momentum", "beta1", "beta2")
"""Options besides `lr` that a schedule may change."""


def value_of_option(group: Mapping[str, Any], name: str) -> Any:
    """Return the value of one of `SCHEDULED`, or of `lr`, in a group of an optimizer of torch; None if it has none."""
    return group["betas"][name == "beta2"] if name.startswith("beta") and "betas" in group else group.get(name)


def scale_option(group: dict[str, Any], name: str, factor: float) -> None:
    """Let an option in `group` be `factor` times its first value, if the group has it."""
    if (now := value_of_option(group, name)) is None:
        return
    value = factor * group.setdefault(f"initial_{name}", now)
    if name.startswith("beta"):
        group["betas"] = (group["betas"][0], value) if name == "beta2" else (value, group["betas"][1])
    elif isinstance(now, torch.Tensor):  # of a compiled step, which reads its memory
        now.fill_(value)
    else:
        group[name] = value


def learning_rates(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Return a dict from TensorBoard tag to learning rate: `lr`, and `lr/NAME` for groups with rates of their own.

    It also has the other options that have a schedule, such as `weight_decay`.
    """
    rates: dict[str, float] = {}
    for group in optimizer.param_groups:
        label = f"/{name}" if (name := group.get("name", "")) else ""
        for option in ("lr", *(each for each in SCHEDULED if f"initial_{each}" in group)):
            rates.setdefault(option + label, float(value_of_option(group, option)))
    return rates


def is_of_torch(kind: str) -> bool:
    return hasattr(torch.optim, kind)


def class_of(kind: str) -> Any:
    """Return the class `kind` of `torch.optim`, or what has this name in the file of the user's workload."""
    return getattr(torch.optim, kind) if is_of_torch(kind) else user_code.find(kind)


def arguments_of(kind: str) -> Mapping[str, inspect.Parameter]:
    """Return the arguments of the class `kind` by name."""
    return inspect.signature(class_of(kind)).parameters


def schema_of(cls: type, kinds: tuple[str, ...], in_group: bool = True) -> type:
    """Return a dataclass of the arguments of the `kinds` that are no options of the component `cls`.

    With `in_group`, it also has those of the options that a group may set.
    """
    hints = {name: hint for name, hint in field_types(cls).items() if name not in OF_ALL} if in_group else {}
    others = {*option_fields(cls), "params", *_IMPLEMENTATION} | ({"betas"} if "beta1" in option_fields(cls) else set())
    for name, parameter in [each for kind in kinds for each in arguments_of(kind).items()]:
        if name not in others:
            of_default = type(parameter.default)
            known = {bool: bool, int: float, float: float, tuple: tuple[float, ...]}
            hints[name] = known.get(of_default, Any)
    schema = make_dataclass(kinds[0], hints.items())
    schema.__module__, schema.__qualname__ = cls.__module__, cls.__qualname__  # of the option file, in error messages
    return schema


def check_accepted(kind: str, options: dict[str, Any], key: str) -> None:
    """Refuse the `options` of a group that torch refuses, which would only look at those of the first group."""
    known, why = arguments_of(kind), ""
    for name, value in options.items():
        if isinstance(value, tuple) and len(value) != (count := len(known[name].default)):
            why = f"{name} needs {count} numbers, and got {[*value]}"
    try:
        class_of(kind)([{"params": []}], **options)
    except (TypeError, ValueError, IndexError) as error:
        why = why or str(error)
    check(not why, key, ABSENT, f"{kind} refuses it: {why}", "see its documentation")


def of_torch(
    kind: str, fuses: bool, groups: list[dict[str, Any]], in_one_kernel: bool, can_be_fused: bool
) -> torch.optim.Optimizer:
    """Return the optimizer `kind` of `torch.optim` for `groups`, as torch takes them.

    `in_one_kernel` asks for operations on many parameters at once, which are fused if `fuses` and `can_be_fused`.
    """
    known = arguments_of(kind)
    fused = fuses and can_be_fused and "fused" in known
    sharded = any(hasattr(parameter, "device_mesh") for group in groups for parameter in group["params"])
    in_one_kernel = in_one_kernel and (not sharded or takes_shards(class_of(kind)))  # else it gathers all at once
    if kind == "SGD":
        # For DTensor parameters torch implements fused Adam, but not fused SGD; and foreach, but not by default.
        fused = fused and not sharded and not any(map(_begins_with_gradient, groups))
    switches = {"fused": fused, "foreach": (in_one_kernel and not fused) or None}  # None is torch's choice
    first = {**groups[0], **(switches if is_of_torch(kind) else {})}
    arguments = {name: value for name, value in first.items() if name in known and name != "params"}
    optimizer = class_of(kind)(groups, **arguments)
    for group in groups if kind == "SGD" else ():
        if group["momentum"] > 0 and not _begins_with_gradient(group):
            # The fused step allocates the buffers itself, but leaves them uninitialized if loss scaling skips the
            # first update. Starting from zeros, the updates are the same.
            for parameter in group["params"]:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def _begins_with_gradient(group: dict[str, Any]) -> bool:
    return group.get("momentum", 0) > 0 and group.get("dampening", 0) != 0


def can_fuse(parameter: torch.Tensor) -> bool:
    """Return whether fused kernels can update `parameter`: they take real numbers, in memory without gaps."""
    local = getattr(parameter, "_local_tensor", parameter)  # of a DTensor
    if not parameter.is_floating_point() or parameter.layout != torch.strided:
        return False
    return torch.empty_like(local, device="meta").stride() == local.stride()


def joined(parts: Sequence[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """Return an optimizer that updates the parameters of all `parts`; a single one as it is."""
    return parts[0] if len(parts) == 1 else _joined_class()(*parts)


def parts_of(optimizer: torch.optim.Optimizer) -> Sequence[torch.optim.Optimizer]:
    """Return the optimizers that `joined` has joined in `optimizer`, with their state; or itself."""
    return optimizer.parts() if hasattr(optimizer, "parts") else [optimizer]  # pyright: ignore


def takes_shards(kind: Any) -> bool:
    """Return whether an optimizer of the class `kind` computes with shards (`DTensor`); others need whole tensors."""
    return kind.__module__.startswith("torch.optim") and kind.__name__ not in ("Adafactor", "Muon", "Rprop")


def is_of_user(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a class of `optimizer` is not one of torch's."""
    return not all(type(each).__module__.startswith("torch.optim") for each in parts_of(optimizer))


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
            for part in parts:  # such as momentum that begins with zeros
                self.state.update(part.state)

        def __getstate__(self) -> dict[str, Any]:
            return super().__getstate__() | {"_parts": tuple(map(copy.copy, self._parts))}  # for copies of this one

        def parts(self) -> tuple[torch.optim.Optimizer, ...]:
            for number, part in enumerate(self._parts):
                # At every call, because loading a state replaces them.
                part.state = self.state
                part.param_groups = [group for group in self.param_groups if group["part"] == number]
            return self._parts

        def step(  # pyright: ignore[reportIncompatibleMethodOverride]
            self, closure: None = None, within: Callable[[Any], AbstractContextManager[Any]] = nullcontext
        ) -> None:
            for part in self.parts():
                with within(part):
                    part.step()

    return Joined


def options_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the numbers among the options of each group, but for those that schedules set before each step."""

    def is_free(group: dict[str, Any], key: str, value: Any) -> bool:
        numbers = value if isinstance(value, tuple) else (value,)
        first = {f"initial_{each}" for each in (("beta1", "beta2") if key == "betas" else (key,))}
        is_scheduled = key == "lr" or key.startswith("initial_") or not first.isdisjoint(group)
        return not is_scheduled and key != "params" and all(type(each) in (int, float) for each in numbers)

    return [
        {key: value for key, value in group.items() if is_free(group, key, value)} for group in optimizer.param_groups
    ]


def changed_options(optimizer: torch.optim.Optimizer, before: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the options of each group that are others than `before`: what they were, and what they are."""
    pairs = zip(before, options_of(optimizer), strict=False)
    return [{k: [then[k], v] for k, v in now.items() if k in then and then[k] != v} for then, now in pairs]


def load_changed_options(optimizer: torch.optim.Optimizer, changed: list[dict[str, Any]]) -> None:
    """Set options that code of the user has changed, unless the run now begins with other ones."""
    for group, options in zip(optimizer.param_groups, changed, strict=False):
        for key, (before, now) in options.items():
            if key in group and group[key] == before and type(now) is type(before):
                group[key] = now
