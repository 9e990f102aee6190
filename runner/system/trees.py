"""Samples and outputs of any structure: tensors, nested in mappings, lists, tuples, named tuples and dataclasses."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch

Tree: TypeAlias = Any
"""A tensor, or tensors and other values that are nested."""


def map_leaves(function: Callable[..., Any], *trees: Any) -> Any:
    """Return a tree of the structure and the types of the first, with `function(*leaves)` for the leaves of all.

    A leaf is whatever is not a container, such as None. Raises a `ValueError` if the structures differ.
    """
    first = trees[0]
    if isinstance(first, torch.Tensor):  # most are: the other questions take longer
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
        return type(first)(*values) if hasattr(first, "_fields") else type(first)(values)
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        mapped = copy.copy(first)
        for field in dataclasses.fields(first):
            if hasattr(first, field.name):
                value = map_leaves(function, *(getattr(each, field.name) for each in trees))
                object.__setattr__(mapped, field.name, value)  # it may be frozen
        return mapped
    return function(*trees)


def map_tensors(function: Callable[[torch.Tensor], Any], tree: Tree) -> Tree:
    """Return a tree as that of `map_leaves`, in which leaves that are no tensors are the same."""
    return map_leaves(lambda leaf: function(leaf) if isinstance(leaf, torch.Tensor) else leaf, tree)


def tensors_of(tree: Tree) -> list[torch.Tensor]:
    """Return the tensors among the leaves of a tree."""
    return [leaf for _, leaf in leaves_of(tree) if isinstance(leaf, torch.Tensor)]


def call(function: Callable[..., Any], inputs: Tree) -> Any:
    """Call a network with one input, with a tuple or list of several, or with a dict of those that have names."""
    if isinstance(inputs, Mapping):
        return function(**inputs)
    return function(*inputs) if isinstance(inputs, tuple | list) else function(inputs)


def num_rows(tree: Tree) -> int:
    """Return the length of the first tensor in a tree that has dimensions; of none, that of the tree itself."""
    return len(next((each for each in tensors_of(tree) if each.dim()), tree))


def rows_of(tree: Tree, start: int, stop: int) -> Tree:
    """Return the rows [start, stop) of each tensor, which has one for each sample, unless it has no dimensions."""
    return map_tensors(lambda each: each[start:stop] if each.dim() else each, tree)


def leaves_of(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a tree, as in `map_leaves`, with their names, such as `outputs.logits` and `outputs.0`."""
    if isinstance(tree, torch.Tensor):
        yield name, tree
        return
    if isinstance(tree, Mapping):
        parts: Any = tree.items()
    elif isinstance(tree, Sequence) and isinstance(tree, list | tuple) and not isinstance(tree, torch.Size):
        parts = enumerate(tree)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        parts = ((each.name, getattr(tree, each.name)) for each in dataclasses.fields(tree) if hasattr(tree, each.name))
    else:
        yield name, tree
        return
    for key, value in parts:
        yield from leaves_of(value, f"{name}.{key}" if name else str(key))
