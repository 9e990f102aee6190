"""The layers of a network from its input to its output, also of one that lists no blocks."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import NamedTuple

import torch

from runner.models.blocks import block_indices, blocks_of


class Layers(NamedTuple):
    """The names of layers from the input to the output, and the index of the layer of each parameter by name.

    If their order cannot be told, there are none, and `why` says the reason.
    """

    names: list[str]
    index_of: dict[str, int]
    why: str = ""


def layers_of(model: torch.nn.Module) -> Layers:
    """Return the layers of `model`: its blocks, if it lists them, and otherwise what its modules tell.

    These are the members of `ModuleList` and `Sequential` in which a class of layers is repeated, in the order in which
    the modules are defined. A layer is a module of several modules; where there is no list of these, any module with
    weights. What comes before the first one is a layer (the embeddings), and so is what comes after the last one (the
    head); what is in between belongs to the next layer. In a list of stages, each with a list of layers, all of these
    count; lists of heads, experts or branches in a layer do not: they have the same length in each, or are further
    inside. Modules with lists of their own beside each other, as an encoder and a decoder, have no order, unless they
    are `Sequential` whose weights fit together.
    """
    if blocks := blocks_of(model):
        return Layers([name for name, _ in blocks], block_indices(model))
    name = type(model).__name__
    for is_layer in (_is_composite, _has_weights):
        if lists := _repeating(model, is_layer):
            if several := _side_by_side(model, lists):
                return Layers([], {}, f"{name} has no blocks(), and its lists of layers have no order: {several}")
            return _in_order(model, list(_units("", model, lists, in_list=False)))
    return Layers([], {}, f"{name} has no blocks(), and no list of layers, from which a depth could be told")


class _Unit(NamedTuple):
    name: str
    parameters: list[torch.nn.Parameter]
    in_list: bool


def _is_composite(module: torch.nn.Module) -> bool:
    return not isinstance(module, torch.nn.Sequential) and any(True for _ in module.children()) and _has_weights(module)


def _has_weights(module: torch.nn.Module) -> bool:
    return any(parameter.dim() > 1 for parameter in module.parameters())


def _repeating(model: torch.nn.Module, is_layer: Callable[[torch.nn.Module], bool]) -> dict[str, torch.nn.Module]:
    """Return the lists in which a class of layers is repeated, by name, without those inside of a layer."""
    found: dict[str, torch.nn.Module] = {}
    where: dict[str, tuple[str, str]] = {}  # the position outside of layers, and inside of them
    lengths: dict[tuple[str, str], set[int]] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.ModuleList | torch.nn.Sequential):
            outside, _, inside = re.sub(r"\.\d+(?=\.)", ".*", f".{name}").rpartition("*.")
            where[name] = outside, inside
            lengths.setdefault((outside, inside), set()).add(len(module))
            counts = Counter(type(child) for child in module.children() if is_layer(child))
            if max(counts.values(), default=0) > 1:
                found[name] = module

    def is_of_stage(name: str) -> bool:
        outside, inside = where[name]
        differs = len(lengths[outside, inside]) > 1 or isinstance(found[name], torch.nn.Sequential)
        return not outside or (differs and "." not in inside)

    return {name: module for name, module in found.items() if is_of_stage(name)}


def _holds(name: str, lists: dict[str, torch.nn.Module]) -> bool:
    return any(each == name or each.startswith(f"{name}.") or not name for each in lists)


def _side_by_side(model: torch.nn.Module, lists: dict[str, torch.nn.Module]) -> str:
    """Return the names of modules that hold lists of layers, but are not called in the order of a list."""
    for name, module in model.named_modules():
        if _holds(name, lists) and not isinstance(module, torch.nn.ModuleList | torch.nn.Sequential):
            inner = {f"{name}.{key}".lstrip("."): child for key, child in module.named_children()}
            inner = {key: child for key, child in inner.items() if _holds(key, lists)}
            if not all(isinstance(b, torch.nn.Sequential) and _may_follow(a, b) for a, b in pairwise(inner.values())):
                return ", ".join(inner)
    return ""


def _may_follow(first: torch.nn.Module, then: torch.nn.Module) -> bool:
    """Return whether the outputs of `first`, perhaps flattened, fit the inputs of `then`, as its weights tell."""
    outputs = [parameter.shape[0] for parameter in first.parameters() if parameter.dim() > 1][-1]
    inputs = next(parameter.shape[1] for parameter in then.parameters() if parameter.dim() > 1)
    return isinstance(first, torch.nn.Sequential) and inputs % outputs == 0


def _units(name: str, module: torch.nn.Module, lists: dict[str, torch.nn.Module], in_list: bool) -> Iterator[_Unit]:
    """Yield the modules that hold no list of layers, in order; before those of a module, its own parameters."""
    if not _holds(name, lists):
        yield _Unit(name, [*module.parameters()], in_list)
        return
    if direct := dict(module.named_parameters(name, recurse=False)):
        yield _Unit(next(iter(direct)), [*direct.values()], False)
    for key, child in module.named_children():
        yield from _units(
            f"{name}.{key}".lstrip("."), child, lists, isinstance(module, torch.nn.ModuleList | torch.nn.Sequential)
        )


def _in_order(model: torch.nn.Module, units: list[_Unit]) -> Layers:
    layers, waiting, seen = list[tuple[str, list[_Unit]]](), list[_Unit](), set[int]()
    for unit in units:
        own = [parameter for parameter in unit.parameters if id(parameter) not in seen]  # tied: of the first one
        seen |= {id(parameter) for parameter in own}
        if not own:
            continue
        unit = unit._replace(parameters=own)
        if unit.in_list and any(parameter.dim() > 1 for parameter in unit.parameters):
            if waiting and not layers:
                layers, waiting = [(waiting[0].name, waiting)], []
            layers.append((unit.name, [*waiting, unit]))
            waiting = []
        elif unit.in_list and layers:  # a normalization after a layer
            layers[-1][1].append(unit)
        else:
            waiting.append(unit)
    num_weights = [sum(p.dim() > 1 for unit in several for p in unit.parameters) for several in (units, waiting)]
    if 2 * num_weights[1] > num_weights[0]:
        why = f"most weights of {type(model).__name__} come after {layers[-1][0]}, the last layer in a list of layers"
        return Layers([], {}, f"{why}, and it has no blocks()")
    if waiting:
        layers.append((waiting[0].name, waiting))
    index_of = {id(p): index for index, (_, several) in enumerate(layers) for unit in several for p in unit.parameters}
    return Layers([name for name, _ in layers], {name: index_of[id(p)] for name, p in model.named_parameters()})
