"""What code of the user refers to: names of its files, variables of closures, attributes of objects."""

from __future__ import annotations

import functools
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch

from runner.code_values import MAX_ITEMS, PLAIN
from runner.config import user_code
from runner.data.generators import KINDS, is_library
from runner.parallel.attributes import OF_TORCH, is_of_user

_MAX_OBJECTS = 1000
_ASKS_FOR_PARAMETERS = {"parameters", "named_parameters", "get_parameter", "_parameters"}


class Place(NamedTuple):
    """Where a value is kept: as `key` of a dict, of a class, or in a variable of a closure.

    The plain values in attributes of modules are saved with them (see `Modules.attributes`).
    """

    name: str
    holder: Any
    key: str
    is_of_module: bool = False

    def get(self) -> Any:
        if isinstance(self.holder, CellType):
            return self.holder.cell_contents
        return vars(self.holder)[self.key] if isinstance(self.holder, type) else self.holder[self.key]

    def set(self, value: Any) -> None:
        if isinstance(self.holder, CellType):
            self.holder.cell_contents = value
        elif isinstance(self.holder, type):
            setattr(self.holder, self.key, value)
        else:
            self.holder[self.key] = value


def roots_of(model: Any, loss: Any) -> dict[str, Any]:
    """Return what a run calls of the user's code, by part: `model`, `loss`, and its functions."""
    if not user_code.given().names():
        return {}
    parts = [part for part in user_code.PARTS if part not in ("model", "data", "collate", "loss")]
    found = {"loss": loss, "model": model} | {part: user_code.find(part) for part in parts}
    return {part: each for part, each in found.items() if each is not None}


def reads_parameters(model: torch.nn.Module, loss: Any) -> bool:
    """Return whether the loss, or a step of the user's, refers to the network or asks one for its parameters."""
    roots = {part: each for part, each in roots_of(model, loss).items() if part in ("loss", *user_code.STEPS)}
    modules: dict[str, torch.nn.Module] = {}
    reached = [*roots.values(), *(place.get() for place in places(roots, modules=modules))]
    codes = [each.__code__ for each in reached if isinstance(each, FunctionType)]
    names = {name for code in codes if _is_of_user(code.co_filename, None) for name in _names_in(code)}
    own = [each for each in (model, user_code.find("model")) if isinstance(each, torch.nn.Module)]
    refers = any(each in modules.values() for network in own for each in network.modules())
    # A step is given the network; `weight` may also be computed of parameters of other names.
    attributes = {"weight", "bias", *(name.rpartition(".")[2] for name, _ in model.named_parameters())}
    return refers or bool(names & (_ASKS_FOR_PARAMETERS | (set() if "loss" in roots else attributes)))


def places(
    roots: Mapping[str, Any],
    holders: dict[str, dict[str, Any]] | None = None,
    modules: dict[str, torch.nn.Module] | None = None,
) -> Iterator[Place]:
    """Yield where `roots`, and what they refer to, keep values; of code of libraries, none.

    `holders` gets the attributes of functions and objects, by name, and `modules` the modules.
    """
    seen, waiting = dict[int, Any](), deque(roots.items())
    while waiting and len(seen) < _MAX_OBJECTS:
        name, value = waiting.popleft()
        if id(value) in seen or isinstance(value, (*PLAIN, torch.Tensor, np.ndarray, *KINDS)):
            continue
        seen[id(value)] = value  # kept, as the identity of one that is gone may be that of the next
        if isinstance(value, Mapping | list | tuple | set | frozenset | deque):
            if len(value) <= MAX_ITEMS:
                items = value.items() if isinstance(value, Mapping) else enumerate(value)
                waiting += [(f"{name}.{key}", each) for key, each in items]
            continue
        if holders is not None and (isinstance(value, FunctionType) or _is_object_of_user(value)):
            holders.setdefault(name, vars(value))
        if modules is not None and isinstance(value, torch.nn.Module):
            modules[name] = value
        for place in _held_by(name, value):
            yield place
            waiting.append((place.name, place.get()))
        waiting += _behind(name, value)


def _held_by(name: str, value: Any) -> list[Place]:
    """Return the places that belong to `value` itself."""
    if isinstance(value, FunctionType):
        if not _is_of_user(value.__code__.co_filename, value.__module__):
            return []
        stem = Path(value.__code__.co_filename).stem
        names = [key for key in _names_in(value.__code__) if key in value.__globals__]
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        variables = [Place(f"{name}.{key}", cell, key) for key, cell in cells if _has_content(cell)]
        own = [Place(f"{name}.{key}", vars(value), key) for key in vars(value)]
        return [Place(f"{stem}.{key}", value.__globals__, key) for key in names] + variables + own
    if isinstance(value, ModuleType):
        is_own = _is_of_user(str(getattr(value, "__file__", "")), value.__name__)
        keys = [key for key in vars(value) if not key.startswith("__")] if is_own else []
        return [Place(f"{name}.{key}", vars(value), key) for key in keys]
    if isinstance(value, type):
        may_change = _is_class_of_user(value) and type(value).__setattr__ is type.__setattr__  # not those of an Enum
        keys = [key for key in vars(value) if not key.startswith("__")] if may_change else []
        return [Place(f"{name}.{key}", value, key) for key in keys]
    if isinstance(value, torch.nn.Module):
        has_extra_state = type(value).get_extra_state is not torch.nn.Module.get_extra_state  # which has all of it
        keys = [key for key in vars(value) if key not in OF_TORCH]
        is_own = is_of_user(value) and not has_extra_state
        return [Place(f"{name}.{key}", vars(value), key, True) for key in keys if is_own]
    return [Place(f"{name}.{key}", vars(value), key) for key in vars(value)] if _is_object_of_user(value) else []


def _behind(name: str, value: Any) -> list[tuple[str, Any]]:
    """Return what `value` calls: the functions of its class, those of its methods, and modules in it."""
    if isinstance(value, MethodType | functools.partial):
        parts = [getattr(value, part, None) for part in ("__self__", "func", "args", "keywords")]
        function = getattr(value, "__func__", None)
        return [(name, each) for each in (*parts, function) if each is not None]
    if isinstance(value, FunctionType):
        wrapped = getattr(value, "__wrapped__", None)
        return [(name, each) for each in (*(value.__defaults__ or ()), wrapped) if each is not None]
    if isinstance(value, type):
        own = [vars(each).values() for each in value.__mro__ if _is_class_of_user(each)]
        held = [getattr(each, "fget", getattr(each, "__func__", each)) for values in own for each in values]
        return [(name, each) for each in held if isinstance(each, FunctionType)]
    if isinstance(value, torch.nn.Module):
        hooks = [vars(value).get(key, {}).values() for key in ("_forward_hooks", "_forward_pre_hooks")]
        children = [(f"{name}.{key}", each) for key, each in value._modules.items() if each is not None]
        return [*children, (f"{name}.__class__", type(value)), *((name, hook) for each in hooks for hook in each)]
    return [] if isinstance(value, ModuleType) else [(f"{name}.__class__", type(value))]


def _names_in(code: CodeType) -> list[str]:
    """Return the names that a function, and those that are defined in it, may look up among globals."""
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    return [*code.co_names, *(name for each in inner for name in _names_in(each))]


def _has_content(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:  # it is empty
        return False
    return True


def _is_of_user(path: str, module: str | None) -> bool:
    own = (module or "").partition(".")[0] in ("runner", "models")
    return bool(path) and not own and not is_library(path)


def _is_class_of_user(cls: type) -> bool:
    path = getattr(sys.modules.get(cls.__module__), "__file__", None) or ""
    return cls.__module__ == "__main__" or _is_of_user(path, cls.__module__)


def _is_object_of_user(value: Any) -> bool:
    is_namespace = type(value).__name__ in ("SimpleNamespace", "Namespace")  # of `types` and `argparse`
    is_other = isinstance(value, type | ModuleType | torch.nn.Module)
    is_own = is_namespace or any(map(_is_class_of_user, type(value).__mro__[:-1]))
    return is_own and not is_other and hasattr(value, "__dict__")
