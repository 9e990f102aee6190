"""Samples and outputs of any structure: tensors, nested in mappings, lists, tuples, and objects with attributes."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias, TypeGuard

import torch

Tree: TypeAlias = Any
"""A tensor, or tensors and other values that are nested."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def map_leaves(function: Callable[..., Any], *trees: Any) -> Any:
    """Return a tree of the structure and the types of the first, with `function(*leaves)` for the leaves of all.

    A leaf is whatever is not a container, such as None. Raises a `ValueError` if the structures differ.
    """
    first = trees[0]
    if isinstance(first, torch.Tensor) or type(first) in _PLAIN:  # most are: the other questions take longer
        return function(*trees)
    if isinstance(first, Mapping):
        if any(not isinstance(each, Mapping) or each.keys() != first.keys() for each in trees):
            raise ValueError("the structures differ")
        is_plain = type(first) is dict or not hasattr(first, "__setitem__")
        mapped = dict(first) if is_plain else copy.copy(first)  # a subclass keeps its attributes
        for key in first:
            mapped[key] = map_leaves(function, *(each[key] for each in trees))  # pyright: ignore[reportIndexIssue]
        return mapped
    if isinstance(first, list | tuple) and not isinstance(first, torch.Size):
        values = [map_leaves(function, *each) for each in zip(*trees, strict=True)]
        if _is_packed(first):
            values[1] = first[1] if isinstance(values[1], torch.Tensor) else values[1]  # their lengths: on the CPU
        if not hasattr(first, "_fields"):
            return type(first)(values)
        mapped = first._make(values)  # pyright: ignore[reportAttributeAccessIssue]
        vars(mapped).update(vars(first)) if hasattr(first, "__dict__") else None
        return mapped
    if _is_dataclass(first):
        mapped = copy.copy(first)
        for field in dataclasses.fields(first):
            if hasattr(first, field.name):
                value = map_leaves(function, *(getattr(each, field.name) for each in trees))
                object.__setattr__(mapped, field.name, value)  # it may be frozen
        return mapped
    if attributes := _attributes(first):
        mapped = copy.copy(first)
        for key, value in attributes.items():
            values = (value, *(getattr(each, key) for each in trees[1:]))
            vars(mapped)[key] = map_leaves(function, *values)
        return mapped
    return function(*trees)


def _is_packed(value: Any) -> bool:
    return isinstance(value, torch.nn.utils.rnn.PackedSequence)  # which importing torch lazily does not need


def _is_dataclass(value: Any) -> TypeGuard[Any]:
    """Return whether `value` is an object of a dataclass, and no array, as those of Zarr are."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type) and not hasattr(value, "__array__")


def _attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object that are tensors, or lists and mappings of some, as of a batch of graphs."""
    if isinstance(value, type | torch.nn.Module):
        return {}

    def holds(each: Any) -> bool:
        parts = each.values() if isinstance(each, Mapping) else each if isinstance(each, list | tuple) else [each]
        return any(isinstance(part, torch.Tensor) for part in parts)

    return {key: each for key, each in getattr(value, "__dict__", {}).items() if holds(each)}


def holds_objects(tree: Tree) -> bool:
    """Return whether something in a tree must hold tensors, as objects that are known by their attributes."""
    if isinstance(tree, torch.Tensor):
        return False
    if isinstance(tree, Mapping):
        return any(map(holds_objects, tree.values()))
    if isinstance(tree, list | tuple):
        return _is_packed(tree) or any(map(holds_objects, tree))
    return bool(_attributes(tree))


def map_tensors(function: Callable[[torch.Tensor], Any], tree: Tree) -> Tree:
    """Return a tree as that of `map_leaves`, in which leaves that are no tensors are the same."""
    return map_leaves(lambda leaf: function(leaf) if isinstance(leaf, torch.Tensor) else leaf, tree)


def doubled(tree: Tree) -> Tree:
    """Return a tree with its floating-point numbers in float64, and its complex ones in complex128."""

    def wide(each: torch.Tensor) -> torch.Tensor:
        return each.double() if each.is_floating_point() else each.to(torch.complex128) if each.is_complex() else each

    return map_tensors(wide, tree)


def is_double(model: torch.nn.Module) -> bool:
    """Return whether a network computes in float64."""
    return any(each.dtype in (torch.float64, torch.complex128) for each in model.parameters())


def tensors_of(tree: Tree) -> list[torch.Tensor]:
    """Return the tensors among the leaves of a tree."""
    return [leaf for _, leaf in leaves_of(tree) if isinstance(leaf, torch.Tensor)]


def strided_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the strided tensors of which a sparse or a nested tensor is made; of any other one, itself."""
    if tensor.is_nested:
        return [*tensor.unbind()]
    if tensor.layout == torch.sparse_coo:
        tensor = tensor.coalesce()
        return [tensor.indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor]


def call(function: Callable[..., Any], inputs: Tree) -> Any:
    """Call a network with one input, with a tuple or list of several, or with a dict of those that have names.

    One whose `forward` takes a single argument, which has no name in the dict, is called with all of them as one.
    """
    if _is_packed(inputs):
        return function(inputs)
    if isinstance(inputs, Mapping):
        return function(inputs) if _takes_one(type(function), (), (*inputs,)) else function(**inputs)
    if not isinstance(inputs, tuple | list):
        return function(inputs)
    return function(inputs) if _takes_one(type(function), (None,) * len(inputs), ()) else function(*inputs)


_TAKE_ONE: dict[tuple[Any, ...], bool] = {}
"""What `_takes_one` has returned; no cache of `functools`, as torch's compiler warns of each of them."""


def _takes_one(network: type, inputs: tuple[None, ...], names: tuple[Any, ...]) -> bool:
    """Return whether the class of a network cannot be called with so many inputs, or such names, but with one input."""
    key = (network, inputs, names)
    if key not in _TAKE_ONE:
        _TAKE_ONE[key] = _binds_one_alone(*key)
    return _TAKE_ONE[key]


def _binds_one_alone(network: type, inputs: tuple[None, ...], names: tuple[Any, ...]) -> bool:
    if not issubclass(network, torch.nn.Module):
        return False
    try:
        signature = inspect.signature(network.forward)
    except (TypeError, ValueError):  # of TorchScript, for example
        return False
    try:
        signature.bind(None, *inputs, **dict.fromkeys(map(str, names)))
    except TypeError:
        try:
            signature.bind(None, None)
        except TypeError:
            return False
        return True
    return False


def num_rows(tree: Tree) -> int:
    """Return the length of the first tensor in a tree that has dimensions; of none, that of the tree itself."""
    return len(next((each for each in tensors_of(tree) if each.dim()), tree))


def rows_of(tree: Tree, start: int, stop: int) -> Tree:
    """Return the rows [start, stop) of each tensor, which has one for each sample, unless it has no dimensions."""
    return map_tensors(lambda each: each[start:stop] if each.dim() else each, tree)


def leaves_of(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a tree, as in `map_leaves`, with their names, such as `outputs.logits` and `outputs.0`."""
    if isinstance(tree, torch.Tensor) or type(tree) in _PLAIN:
        yield name, tree
        return
    if isinstance(tree, (list, tuple)) and not isinstance(tree, torch.Size):  # first, as it is found fastest
        parts: Any = enumerate(tree)
    elif isinstance(tree, (dict, Mapping)):
        parts = tree.items()
    elif _is_dataclass(tree):
        parts = ((each.name, getattr(tree, each.name)) for each in dataclasses.fields(tree) if hasattr(tree, each.name))
    elif attributes := _attributes(tree):
        parts = attributes.items()
    else:
        yield name, tree
        return
    for key, value in parts:
        yield from leaves_of(value, f"{name}.{key}" if name else str(key))
