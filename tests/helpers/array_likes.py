"""What users pass in place of arrays: columns and tables in the form of Arrow, and masked tensors."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.masked import masked_tensor


@dataclass
class Column:
    """A column of Arrow, whose missing values are NaN in an array; a dataclass, as an array of Zarr."""

    array: Any
    null_count: int = 0

    def __array__(self, *_: Any, **__: Any) -> Any:
        return self.array


class Table:
    """A table of Arrow, whose `columns` are no names."""

    def __init__(self, parts: dict[str, Column]):
        self.parts, self.columns = parts, [*parts.values()]

    @property
    def column_names(self) -> list[str]:
        return [*self.parts]

    def itercolumns(self) -> Any:
        return iter(self.columns)

    def select(self, names: list[str]) -> Table:
        return Table({name: self.parts[name] for name in names})

    def __array__(self, *_: Any, **__: Any) -> Any:
        return np.stack([each.array for each in self.columns], 1)


def masked_positive(values: torch.Tensor) -> Any:
    with warnings.catch_warnings(action="ignore"):  # its interface may change
        return masked_tensor(values, values > 0)


class Closed(Mapping[str, Any]):
    """A file of HDF5 that is closed."""

    def __getitem__(self, key: str) -> Any:
        raise ValueError("it is closed")

    def __len__(self) -> int:
        raise ValueError("it is closed")

    def __iter__(self) -> Iterator[str]:
        raise ValueError("it is closed")


class Group(Mapping[str, Any]):
    """A group of a file of HDF5, into which nothing may be written."""

    def __init__(self, **parts: Any):
        self.parts = parts

    def __getitem__(self, key: str) -> Any:
        return self.parts[key]

    def __len__(self) -> int:
        return len(self.parts)

    def __iter__(self) -> Iterator[str]:
        return iter(self.parts)

    def __setitem__(self, key: str, value: Any) -> None:
        raise PermissionError
