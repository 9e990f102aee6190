"""What code of the user keeps outside of modules: names of its files, variables of closures, attributes of objects.

It belongs to the run, as the state of a module does: a counter, by which a weight of the loss rises, is saved, goes on
in a resumed run, and is the same with and without evaluations.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from runner.code_values import MAX_ITEMS, PLAIN, is_saved, is_state, mark, packed, restorer, unpacked
from runner.config import user_code
from runner.config.errors import ConfigError
from runner.data.generators import KINDS, is_library
from runner.parallel import full_state
from runner.parallel.attributes import OF_TORCH, digest, is_of_user
from runner.parallel.buffers import buffers_kept
from runner.storage.value_checks import UnexpectedContentError

if TYPE_CHECKING:
    from runner.run import Run

log = logging.getLogger(__name__)

_MAX_OBJECTS = 1000
_STATE = ".state_dict()"
_READ_AFTER_EVALUATIONS = ("after_evaluation", "metrics", "evaluation_step")
"""Parts that may collect what an evaluation computes, as predictions: what they use, an evaluation may change."""
_ASKS_FOR_PARAMETERS = {"parameters", "named_parameters", "get_parameter"}


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


class CodeState:
    """The values that functions and modules of the user use and may change: numbers, texts, tensors, generators.

    Also lists, dicts and sets of them. Large ones, such as data, are left out.

    Args:
        roots: the functions and objects of the user by the part that they are; others that they refer to are found.
    """

    def __init__(self, roots: Mapping[str, Any]):
        self._roots = dict(roots)
        self._beginning, self._versions = dict[str, Any](), dict[int, tuple[torch.Tensor, int]]()
        self._said = False

    def begin(self) -> None:
        """Remember the values, and those of modules by a hash: `changed` returns those that are others by then."""
        self._beginning = self.marks()
        self._beginning |= {name: marks_of(module) for name, module in self._modules().items()}
        self._versions = {id(each): (each, each._version) for _, each in self._parameters()}

    def marks(self) -> dict[str, Any]:
        """Return what tells whether values have changed, by name."""
        return {name: mark(value) for name, value in self._values().items()}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the values that are tensors by name."""
        return {name: value for name, value in self._values().items() if isinstance(value, torch.Tensor)}

    def _values(self) -> dict[str, Any]:
        return {name: place.get() for name, place in self._places(self._roots).items()}

    def _places(self, roots: Mapping[str, Any], holders: dict[str, dict[str, Any]] | None = None) -> dict[str, Place]:
        found = {place.name: place for place in places(roots, holders)}
        return {name: place for name, place in found.items() if is_state(place.get())}

    def _modules(self) -> dict[str, torch.nn.Module]:
        """Return the modules that are no part of the network or the loss of the run, such as a teacher in a name."""
        found = dict[str, torch.nn.Module]()
        for _ in places(self._roots, modules=found):
            pass
        own = [each for part in ("model", "loss") for each in (self._roots.get(part), user_code.find(part))]
        seen = {id(m) for each in own if isinstance(each, torch.nn.Module) for m in each.modules()}
        result = dict[str, torch.nn.Module]()
        for name, module in found.items():
            if id(module) not in seen and module.state_dict():
                result[name + _STATE] = module
                seen |= {*map(id, module.modules())}
        return result

    @contextmanager
    def unchanged(self, in_evaluation: bool = False) -> Iterator[None]:
        """A context at whose end all values are those of before.

        In an evaluation, they are those that training uses, but not what is read after evaluations; generators always.
        """
        read = {key: each for key, each in self._roots.items() if key in _READ_AFTER_EVALUATIONS and in_evaluation}
        holders, others = dict[str, dict[str, Any]](), dict[str, dict[str, Any]]()
        free = {name for name, place in self._places(read, others).items() if not isinstance(place.get(), KINDS)}
        found = self._places(self._roots, holders)
        before = [(place, restorer(place.get())) for name, place in found.items() if name not in free]
        shared = {*map(id, others.values())}
        keys = [(each, {*each}) for each in holders.values() if id(each) not in shared]
        try:
            with buffers_kept([*self._modules().values()]):
                yield
        finally:
            for place, restore in before:
                place.set(restore())
            for each, names in keys:
                for name in [name for name in each.keys() - names if is_state(each[name])]:
                    del each[name]

    def changed(self) -> dict[str, Any]:
        """Return the values that have changed since the beginning of the run, as a checkpoint holds them, by name.

        Those that none holds are said, once.
        """
        found, missing, kept, lost = self._places(self._roots), object(), dict[str, Any](), list[str]()
        for name, place in found.items():
            value = place.get()
            if place.is_of_module and isinstance(value, PLAIN):
                continue
            if self._beginning.get(name, missing) != mark(value):
                try:
                    kept[name] = packed(value)
                except TypeError:
                    lost.append(name)
        for name, module in self._modules().items():
            if self._beginning.get(name) != marks_of(module):
                kept[name] = {key: packed(each) for key, each in module.state_dict().items() if torch.is_tensor(each)}
        if lost and not self._said:
            self._said = True
            text = "%s changes in training, and no checkpoint has it, as it is no number: a run that is resumed begins "
            log.warning(text + "with its first value", ", ".join(lost))
        return kept

    def load(self, values: Mapping[str, Any], device: torch.device) -> None:
        """Set the values that `changed` returned; tensors that the code has not made yet are on `device`.

        Raises:
            UnexpectedContentError: if they are none that a run saves.
        """
        holders = dict[str, dict[str, Any]]()
        found = {place.name: place for place in places(self._roots, holders)}
        modules = self._modules()
        for name, value in values.items():
            if name in modules:
                for key, each in modules[name].state_dict(keep_vars=True).items():
                    if key in value and torch.is_tensor(each):
                        each.data = each.data.to(value[key].dtype)  # as the first call of the code perhaps does
                full_state.load_module(modules[name], value, name)
                continue
            owner, _, key = name.rpartition(".")
            if name not in found and owner in holders:  # an attribute that the first call gives it
                holders[owner][key] = None
                found[name] = Place(name, holders[owner], key)
            if name not in found:
                log.warning("the checkpoint has a value of %s, which this code has not: it begins anew", name)
            elif not is_state(found[name].get()) or not is_saved(value):
                raise UnexpectedContentError(f"the state of the code, {name}: it is no number")
            else:
                found[name].set(unpacked(value, found[name].get(), device))

    def check_trained(self, model: torch.nn.Module) -> None:
        """Refuse a parameter outside of `model` that has a gradient after a step, and no optimizer.

        If it is one of a module, as of a network that compares images, that is only said.
        """
        own, said = {id(each) for each in model.parameters()}, set[str]()
        for place, each in self._parameters():
            _, version = self._versions.get(id(each), (each, each._version))
            if each.grad is None or id(each) in own or each._version != version:  # code of the user may update it
                continue
            why = f"{place.name} gets a gradient, but it is no part of the network, and would not be trained"
            if not isinstance(place.get(), torch.nn.Module):
                remedy = "make it a part of the network, which training_step(model, batch) is given"
                raise ConfigError("model", type(model).__name__, why, remedy)
            if place.name not in said:
                said.add(place.name)
                log.warning("%s; requires_grad_(False) saves the time", why.replace("would not be", "is not"))

    def _parameters(self) -> Iterator[tuple[Place, torch.Tensor]]:
        """Yield what could be trained, and where it is kept."""
        for place in places(self._roots):
            value = place.get()
            for each in value.parameters() if isinstance(value, torch.nn.Module) else [value]:
                if isinstance(each, torch.Tensor) and each.is_leaf and each.requires_grad:
                    yield place, each

    @contextmanager
    def standing_for(self, own: Sequence[tuple[Any, Any]]) -> Iterator[None]:
        """A context in which names for the first object of each pair, of which a run has a copy, stand for the copy."""
        changed = list[tuple[Place, Any]]()
        for place in [*places(self._roots)]:
            for given, copied in own:
                if place.get() is given and given is not copied:
                    changed.append((place, given))
                    place.set(copied)
        try:
            yield
        finally:
            for place, given in changed:
                place.set(given)


def roots_of(model: Any, loss: Any) -> dict[str, Any]:
    """Return what a run calls of the user's code, by part: `model`, `loss`, and its functions."""
    if not user_code.given().names():
        return {}
    parts = [part for part in user_code.PARTS if part not in ("model", "data", "collate", "loss")]
    found = {"loss": loss, "model": model} | {part: user_code.find(part) for part in parts}
    return {part: each for part, each in found.items() if each is not None}


def marks_of(module: torch.nn.Module) -> dict[str, Any]:
    """Return what tells whether the weights or buffers of a module have changed."""
    dense = {name: each for name, each in module.state_dict().items() if torch.is_tensor(each) and not each.is_sparse}
    return {name: digest(each) for name, each in dense.items()}


def before(run: Run) -> CodeState:
    """Return the state of the user's code before a network is made of it."""
    return CodeState(roots_of(user_code.find("model"), run.workload.user_loss))


def copies(model: torch.nn.Module, loss: Any) -> list[tuple[Any, Any]]:
    """Return the objects that the user gives as network and loss with those of the run, for `standing_for`."""
    pairs = [(user_code.find("model"), model), (user_code.find("loss"), loss)]
    return [(given, own) for given, own in pairs if given is not None and not isinstance(given, type | FunctionType)]


def reads_parameters(model: torch.nn.Module, loss: Any) -> bool:
    """Return whether the loss, or a step of the user's, refers to the network or asks one for its parameters."""
    roots = {part: each for part, each in roots_of(model, loss).items() if part in ("loss", *user_code.STEPS)}
    modules: dict[str, torch.nn.Module] = {}
    reached = [*roots.values(), *(place.get() for place in places(roots, modules=modules))]
    codes = [each.__code__ for each in reached if isinstance(each, FunctionType)]
    names = {name for code in codes if _is_of_user(code.co_filename, None) for name in _names_in(code)}
    own = [each for each in (model, user_code.find("model")) if isinstance(each, torch.nn.Module)]
    refers = any(each in modules.values() for network in own for each in network.modules())
    return refers or bool(names & _ASKS_FOR_PARAMETERS)


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
        keys = [key for key in vars(value) if not key.startswith("__")] if _is_class_of_user(value) else []
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
