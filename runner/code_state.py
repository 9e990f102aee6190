"""What code of the user keeps outside of modules: names of its files, variables of closures, attributes of objects.

It belongs to the run, as the state of a module does: a counter, by which a weight of the loss rises, is saved, goes on
in a resumed run, and is the same with and without evaluations.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch

from runner.code_places import Place, places, roots_of
from runner.code_values import PLAIN, is_saved, is_state, mark, packed, restorer, unpacked
from runner.config import user_code
from runner.config.errors import ConfigError
from runner.data.generators import KINDS
from runner.parallel import full_state
from runner.parallel.attributes import digest
from runner.parallel.buffers import buffers_kept
from runner.storage.value_checks import UnexpectedContentError

if TYPE_CHECKING:
    from runner.run import Run

log = logging.getLogger(__name__)

_STATE = ".state_dict()"
_READ_AFTER_EVALUATIONS = ("after_evaluation", "metrics", "evaluation_step")
"""Parts that may collect what an evaluation computes, as predictions: what they use, an evaluation may change."""


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
