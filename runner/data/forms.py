"""What users pass as data: data sets, streams, lists, tensors, arrays and tables, in one of two forms.

A sample is (input, target), each a tensor, an array or a number, or a tuple or dict of them; or a dict, whose `labels`
or `label` is the target. So are arrays of all samples: (inputs, targets), or a dict.
"""

from __future__ import annotations

import itertools
import logging
import warnings
from collections import UserDict
from collections.abc import Collection, Iterable, Iterator, Mapping
from numbers import Integral, Real
from operator import itemgetter
from types import NoneType
from typing import Any

import numpy as np
import torch
from torch.masked import is_masked_tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    default_collate,
    default_convert,
)

from runner.config.errors import ConfigError, check, shortened
from runner.system.trees import Tree, leaves_of, map_leaves, map_tensors, num_rows, tensors_of

log = logging.getLogger(__name__)


def is_pair(given: Any, is_divided: bool = True) -> bool:
    """Return whether something is two data sets; (inputs, targets) and a list of two samples are one.

    Samples that are not divided into inputs and targets may be dicts without `labels`.
    """
    if not isinstance(given, tuple | list) or len(given) != 2:
        return False
    if all(isinstance(each, Dataset | DataLoader) for each in given):
        return True
    if not is_divided and all(map(torch.is_tensor, given)) and len(given[0]) != len(given[1]):
        return True  # no (inputs, targets)
    return isinstance(given, tuple) and (
        not _are_arrays(given)
        or all(_is_array_form(each) or (isinstance(each, Mapping) and not is_divided) for each in given)
    )


def _is_array_form(given: Any) -> bool:
    """Return whether arrays are the inputs and the targets of a data set."""
    return (isinstance(given, tuple) and len(given) == 2) or _label_key(given) is not None


def _label_key(given: Any) -> str | None:
    """Return the key of the targets in a dict, as in Hugging Face's; None if it is no dict or has none."""
    return next((key for key in ("labels", "label") if isinstance(given, Mapping) and key in given), None)


def pair(sample: Any, what: str, name: str) -> tuple[Tree, Tree]:
    """Return (input, target) of a sample or a batch, which messages call `what`, of the data set `name`."""
    if (key := _label_key(sample)) is not None:
        return {each: value for each, value in sample.items() if each != key}, sample[key]
    length = f" of {len(sample)}" if isinstance(sample, tuple | list) else ""
    why, remedy = f"{what} is {type(sample).__name__}{length}, not (input, target)", "return a pair of tensors, arrays "
    remedy += "or numbers, or of tuples or dicts of them; or a dict with `labels`"
    check(isinstance(sample, tuple | list) and len(sample) == 2, "data", name, why, remedy)
    return sample[0], sample[1]


def with_columns_of(train: Any, held_out: Any) -> Any:
    """Return held-out arrays, their tables with the columns in the order of those of the training arrays.

    Raises:
        ConfigError: if the columns have other names.
    """
    if not (isinstance(train, tuple) and isinstance(held_out, tuple)):
        return held_out
    parts = list(held_out)
    for number, pair in enumerate(zip(train, held_out, strict=False)):
        names, theirs = ([*_columns(each)] for each in pair)
        if names and theirs and names != theirs:
            why = f"held-out tables have the columns {theirs}, training tables {names}"
            same = sorted(map(str, names)) == sorted(map(str, theirs)) and len({*names}) == len(names)
            check(same, "", type(pair[1]).__name__, shortened(why), "let both have the same columns")
            parts[number] = pair[1].select(names) if hasattr(type(pair[1]), "select") else pair[1][names]
    return tuple(parts)


def _columns(given: Any) -> Any:
    """Return the names of the columns of a table, of pandas, polars or Arrow; of anything else, nothing."""
    # Not by `hasattr(given, …)`: a column of pandas may have this name.
    return given.column_names if hasattr(type(given), "column_names") else getattr(given, "columns", ())


def _parts(given: Any) -> list[Any]:
    """Return the columns of a table of Arrow or polars; of anything else, nothing."""
    parts = getattr(type(given), "itercolumns", None) or getattr(type(given), "iter_columns", None)
    return [*parts(given)] if parts else []


def _num_nulls(given: Any) -> int:
    """Return how many values of a table or a column of polars or Arrow are missing."""
    if parts := _parts(given):
        return sum(map(_num_nulls, parts))
    count = given.null_count if hasattr(type(given), "null_count") else 0
    return int(np.asarray(count() if callable(count) else count).sum())


def _are_arrays(tree: Tree) -> bool:
    if isinstance(tree, Mapping | tuple) and len(tree):  # not `and tree`, which a TensorDict refuses
        return all(map(_are_arrays, tree.values() if isinstance(tree, Mapping) else tree))
    return hasattr(tree, "__array__")  # of torch, NumPy and pandas


def _dicts(tree: Tree) -> Tree:
    """Return a tree with dicts in place of mappings that may not take tensors of another length, such as files."""
    if type(tree) is dict or (isinstance(tree, Mapping) and not isinstance(tree, dict | UserDict)):
        return {key: _dicts(each) for key, each in tree.items()}
    return tuple(map(_dicts, tree)) if type(tree) is tuple else tree


class Arrays(Dataset):
    """The samples in tensors, or trees of tensors, which have a row for each; targets may be `()`, as in `whole`."""

    def __init__(self, inputs: Tree, targets: Tree, classes: Any):
        self.inputs, self.targets, self.classes = inputs, targets, classes

    def __len__(self) -> int:
        return num_rows((self.inputs, self.targets))

    @property
    def is_divided(self) -> bool:
        """Whether samples are (input, target)."""
        return bool(tensors_of(self.targets))

    @property
    def labels(self) -> Tree:
        """The targets; of samples that are not divided, the `labels` or the `label` in a dict, or nothing."""
        key = None if self.is_divided else _label_key(self.inputs)
        return self.targets if key is None else self.inputs[key]  # pyright: ignore[reportIndexIssue]

    def __getitem__(self, index: Any) -> Tree:
        inputs, targets = map_tensors(lambda each: each[index], (self.inputs, self.targets))
        return (inputs, targets) if self.is_divided else inputs


def data_set(given: Any, is_divided: bool = True) -> Any:
    """Return `Arrays`, another map-style data set, or a stream; refuse what is none of them.

    Samples of arrays are (input, target); if they need not be, those of other arrays than (inputs, targets) are rows.
    """
    name = type(given).__name__
    if isinstance(given, type):
        given = given()
    of = given
    if type(given) is TensorDataset:  # a subclass may change the samples
        given = given.tensors
    if type(given) is Subset and type(given.dataset) in (TensorDataset, Arrays):
        whole: Any = given.dataset
        given = whole[torch.as_tensor(given.indices)]
    if isinstance(given, tuple | Mapping) and len(given) and _are_arrays(given):
        why = f"it has {len(given)} arrays, and a sample is (input, target)"
        remedy = "pass (inputs, targets), or ((inputs, targets), (held-out inputs, held-out targets)); several inputs "
        remedy += "are a tuple or a dict, and so are several targets, as in ((images, tables), (classes, weights))"
        check(_is_array_form(given) or not is_divided, "", name, why, remedy)
        is_whole = not is_divided and (isinstance(given, Mapping) or len(given) != 2)
        inputs, targets = map_leaves(_tensor, _dicts((given, ()) if is_whole else pair(given, "it", name)))
        lengths = [len(each) for each in tensors_of((inputs, targets))]
        is_plain = isinstance(inputs, torch.Tensor) and isinstance(targets, torch.Tensor)
        why = f"there are {lengths[0]} inputs and {lengths[-1]} targets"
        why = why if is_plain else f"the arrays have different lengths: {', '.join(map(str, lengths))}"
        remedy = "pass one target for each input" if lengths[0] else "pass samples; held-out ones are needed as well"
        check(lengths[0] > 0 and len({*lengths}) == 1, "", name, why, remedy)
        return Arrays(inputs, targets, _classes_of(of))
    if isinstance(given, Arrays):
        return given
    remedy = "pass data sets with __len__ and __getitem__, lists of (input, target), or tensors (inputs, targets)"
    if isinstance(given, DataLoader):
        lost = ", ".join(_choices_of(given))
        remedy = f"pass loader.dataset, and do in its __getitem__ and __len__ what its {lost} did" * bool(lost)
        why = "the batches are made by the runner: of all samples, each once an epoch, in random order"
        raise ConfigError("", name, why, remedy or "pass loader.dataset")
    if isinstance(given, IterableDataset):
        return given
    why = "an iterator can be read once only, and a run reads its data several times"
    is_iterator = isinstance(given, Iterator)
    check(not is_iterator, "", name, why, "yield the samples in __iter__ of a torch.utils.data.IterableDataset")
    why, choice = "the items of a table are its columns, and no samples", "(table[[…]], table[…]): inputs and targets"
    is_table = hasattr(given, "__array__") and len(_columns(given)) > 0
    check(not is_table, "", name, why, f"pass {choice if is_divided else 'an array: table.to_numpy()'}")
    is_map_style = hasattr(given, "__getitem__") and hasattr(given, "__len__")
    more = ", and two of them as a tuple (training, held out)" * isinstance(given, tuple | dict | NoneType)
    usable = is_map_style and not isinstance(given, tuple | dict | str)
    check(usable, "", name, "it is no map-style data set", remedy + more)
    check(len(given) > 0, "", name, "it is empty", "pass one with samples")
    return given


def _tensor(given: Any) -> torch.Tensor:
    """Return a tensor of what is given: a tensor, an array or a table, whose columns may have several types."""
    name, names = type(given).__name__, [*_columns(given)]
    if isinstance(given, torch.Tensor):
        kind = "masked" if is_masked_tensor(given) else "nested" if given.is_nested else str(given.layout)[6:]
        why = f"it is a {kind} tensor, of which torch makes no batches"
        check(kind == "strided", "", name, why, "pass a dense one, or samples and collate")
        return given.detach()
    missing = _num_nulls(given)  # which would become NaN, and integers with them floating-point numbers
    check(not missing, "", name, f"{missing} of its values are missing", "replace what is missing: fill_null(value)")
    if hasattr(given, "isna"):  # of pandas
        kinds = given.dtypes if given.ndim == 2 else [given.dtype]
        if not all(isinstance(kind, np.dtype) for kind in kinds):  # what is missing would become NaN
            given = given.astype(object)
    parts = [*map(np.asanyarray, _parts(given))]
    if any(part.dtype.kind in "mM" for part in parts):  # times, of which polars would make numbers, as others have some
        given = np.stack([part.astype(object) for part in parts], 1)
    array = np.asanyarray(given)  # which keeps a mask
    check(array.ndim > 0, "", name, "it is a single value, and not an array", "pass arrays of samples")
    if np.ma.is_masked(array):
        masked = np.argwhere(np.ma.getmaskarray(array))
        where = "".join(f", column {column}" for column in masked[0][1:2])
        why = f"row {masked[0][0]}{where} is masked, as are {len(masked) - 1} other values: they would be fill values"
        raise ConfigError("", name, why, "leave these samples out, or replace what is masked: array.filled(value)")
    if array.dtype.kind not in "biufc":
        is_number = (array.dtype == object and isinstance(each, Real | np.bool_) for each in array.flat)
        where = next(
            (index for index, found in zip(np.ndindex(array.shape), is_number, strict=True) if not found), None
        )
        if where is not None:
            columns = names or range(where[-1] + 1)
            place = f"row {where[0]}" + "".join(f", column {columns[index]}" for index in where[1:2])
            why, remedy = f"{place} is {array[where]!r}, no number", "encode text, dates and categories as numbers"
            raise ConfigError("", name, why, f"{remedy}, and replace what is missing")
        array = np.array(array.tolist())
    kind, dtype = array.dtype.kind, array.dtype.newbyteorder("=")
    if kind == "u" and array.dtype.itemsize > 1:  # types for which torch has few operations
        why = f"{array.max(initial=0)} is larger than the largest integer of torch, 2⁶³ − 1"
        check(array.max(initial=0) < 2**63, "", name, why, "subtract an offset, or use floating-point numbers")
        dtype = np.dtype(np.int64)
    if array.dtype.itemsize > 8 * (1 + (kind == "c")):  # long double
        dtype = np.dtype(np.complex128 if kind == "c" else np.float64)
    with warnings.catch_warnings(action="ignore"):  # it may be read-only, as one mapped to a file; nothing writes to it
        return torch.as_tensor(np.ascontiguousarray(np.asarray(array), dtype))


def single(inputs: torch.Tensor) -> torch.Tensor:
    """Return inputs in float32 if they are in another precision, as float64 of NumPy: precision=64 converts back."""
    return inputs.float() if inputs.is_floating_point() else inputs


def singles(inputs: Tree, doubles: Collection[str] | None) -> Tree:
    """Return inputs, each as by `single`, but for those whose names are among `doubles`; None are all of them."""
    if doubles is None:
        return inputs
    if not doubles:
        return map_tensors(single, inputs)
    names = iter([name for name, _ in leaves_of(inputs)])

    def converted(leaf: Any) -> Any:
        is_double = next(names) in doubles
        return single(leaf) if isinstance(leaf, torch.Tensor) and not is_double else leaf

    return map_leaves(converted, inputs)


def needing_double(batches: Iterable[Tree]) -> set[str]:
    """Return the names of inputs in float64, such as times in seconds, of which float32 would keep too few digits.

    They stay float64, as in plain PyTorch, where the network subtracts an offset, for example.
    """
    leaves = itertools.chain.from_iterable(map(leaves_of, batches))
    found = {name for name, leaf in leaves if isinstance(leaf, torch.Tensor) and _is_lost(leaf)}
    for name in found:
        text = "data: inputs%s stay in float64, as float32 would round them by more than a thousandth of their spread: "
        text += "subtract an offset from them, or let the network do it, and convert the difference"
        log.warning(text, f".{name}" if name else "")
    return found


def _is_lost(values: torch.Tensor) -> bool:
    if values.dtype != torch.float64 or values.layout != torch.strided or values.is_nested or values.dim() < 1:
        return False
    rows = values.reshape(len(values), -1)
    if len(rows) < 2 or not rows.numel() or not bool(rows.isfinite().all()):
        return False
    error, spread = (rows - rows.float().double()).abs().amax(0), rows.std(0)
    return bool(((spread > 0) & (error > 1e-3 * spread)).any())


def _choices_of(loader: DataLoader) -> list[str]:
    """Return the names of the arguments of a loader with which it makes other batches than the runner."""
    kinds = {"sampler": (SequentialSampler, RandomSampler, type(None)), "batch_sampler": (BatchSampler, type(None))}
    lost = [name for name, usual in kinds.items() if type(getattr(loader, name)) not in usual]
    lost += ["sampler"] if type(loader.sampler) is RandomSampler and loader.sampler.replacement else []
    lost += ["collate_fn"] if loader.collate_fn not in (default_collate, default_convert) else []
    return lost + ["worker_init_fn"] * (loader.worker_init_fn is not None)


def _classes_of(dataset: Any) -> Any:
    """Return the attribute `classes` of a data set, or of the one in it; None if there is none."""
    while (found := getattr(dataset, "classes", None)) is None and hasattr(dataset, "dataset"):
        dataset = dataset.dataset
    return found


def class_names(dataset: Any) -> list[str]:
    """Return the names in the attribute `classes` of a data set: a list, an array, a mapping, or their number.

    The list is empty if there is none; what is neither is not used, and this is said.
    """
    given = found = _classes_of(dataset)
    if hasattr(found, "tolist"):  # of torch, NumPy and pandas
        found = found.tolist()
    if isinstance(found, Integral) and not isinstance(found, bool):
        found = range(int(found))
    if isinstance(found, Mapping):  # from a name to its index, or from an index to its name
        of_names = all(isinstance(each, Integral) for each in found.values())
        of_indices = all(isinstance(each, Integral) for each in found)
        pairs = [(number, name) if of_names else (name, number) for name, number in found.items()]
        found = [name for _, name in (sorted(pairs, key=itemgetter(0)) if of_names or of_indices else pairs)]
    if isinstance(found, set | frozenset):
        found = sorted(found, key=str)
    is_list = isinstance(found, Collection) and not isinstance(found, str | bytes)
    is_list = is_list and not any(isinstance(each, list) for each in found)
    names = [str(each) for each in found] if is_list else []
    if given is not None and len({*names}) < max(1, len(names)):
        text = "data: the attribute classes of %s is not used: it is %s, not a list of different names or their number"
        log.warning(text, type(dataset).__name__, shortened(repr(given)))
        return []
    return names
