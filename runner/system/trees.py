"""Outputs of any structure: tensors, nested in mappings, lists, tuples, named tuples and dataclasses."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch


def map_leaves(function: Callable[..., Any], *trees: Any) -> Any:
    """Return a tree of the structure and the types of the first, with `function(*leaves)` for the leaves of all.

    A leaf is whatever is not a container, such as None. Raises a `ValueError` if the structures differ.
    """
    first = trees[0]
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


def leaves_of(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a tree, as in `map_leaves`, with their names, such as `outputs.logits` and `outputs.0`."""
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
