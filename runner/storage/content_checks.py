"""Checks of values from a checkpoint, before they are used: the checkpoint may come from an untrusted source."""

from __future__ import annotations

import math
import reprlib
from typing import Any, NamedTuple

import torch

_PLAIN = (bool, int, float, complex, str, type(None))

_MOST_VALUES, _DEEPEST = 3_000_000, 100

_INTERCHANGEABLE = {"torch.float32", "torch.float64"}
"""The dtypes of parameters: a run that saved one of these dtypes may be resumed with the other."""


class UnexpectedContentError(RuntimeError):
    """Raised when a value in a checkpoint has an unexpected form, for example another type, shape or dtype."""


CONTENT_ERRORS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""The exceptions that may be raised when a value of an unexpected type or size is loaded."""


class TensorSpec(NamedTuple):
    """A specification of a tensor, which must be dense, contiguous, on the CPU and finite.

    Args:
        dtype: the dtype of the tensor; float64 is also accepted for float32, and float32 for float64.
        shape: the size of each dimension; a dimension that is None may have any size.
    """

    dtype: torch.dtype
    shape: tuple[int | None, ...]


def check_like(value: Any, like: Any, where: str) -> None:
    """Check that a value from a checkpoint has the form that `like` describes.

    `like` has one of these forms:

    - a tensor or a `TensorSpec`: the value must be a tensor of this shape and dtype (see `TensorSpec`);
    - a dict: the value must be a dict with the same keys, and each item must have the form of the corresponding item in
      `like`;
    - `{str: form}`: the value must be a dict with strings as keys, and each item must have the form `form`;
    - `[form]`: the value must be a list of any length, and each item must have the form `form`;
    - a tuple: the value must be a tuple of the same length, and each item must have the form of the corresponding item
      in `like`;
    - a type: the value must have exactly this type, except that `float` also allows an int, and `object` allows any
      type. The value must not be NaN.

    Args:
        value: the value to check. Only the parts that `like` describes are examined, so a deep or cyclic value does no
            harm.
        like: the form that the value must have.
        where: the name of the value in the error message.

    Raises:
        UnexpectedContentError: if `value` has another form.
    """
    if isinstance(like, torch.Tensor):
        like = TensorSpec(like.dtype, tuple(like.shape))
    if isinstance(like, TensorSpec):
        _check_tensor(value, like, where)
    elif isinstance(like, type):
        _check_type(value, like, where)
    else:
        _check_type(value, type(like), where)
        for name, item, wanted in _items(value, like, where):
            check_like(item, wanted, f"{where}, {name}")


def check_plain(content: Any, where: str) -> None:
    """Check that `content` consists of plain values and tensors, and is small enough to be examined quickly.

    Plain values and tensors may be items of dicts, lists, tuples and sets. A small file can have a huge content, for
    example nested lists in which the same list occurs many times, or a tensor whose elements share memory.

    Args:
        content: the values that were loaded from a file.
        where: the name of the content in the error message.

    Raises:
        UnexpectedContentError: if `content` contains an object of any other type; if it contains an integer with an
            absolute value of 2**256 or more, or a tensor whose elements share memory; or if it has too many values or
            is nested too deeply.
    """
    remaining, count = [(content, 0)], 0
    while remaining:
        value, depth = remaining.pop()
        count += 1
        _require(count <= _MOST_VALUES and depth <= _DEEPEST, where, "too many nested values", "a state")
        if isinstance(value, torch.Tensor):
            shared = value.layout != torch.strided or value.nbytes > value.untyped_storage().nbytes()
            _require(not shared, where, "a tensor whose elements share memory", "one with a value of its own for each")
        elif isinstance(value, dict):
            _require(all(type(key) in _PLAIN for key in value), where, "a key of another type", "plain keys")
            remaining += [(item, depth + 1) for item in value.values()]
        elif isinstance(value, list | tuple | set):
            remaining += [(item, depth + 1) for item in value]
        else:
            _require(type(value) in _PLAIN, where, type(value).__name__, "a plain value")
            is_huge = type(value) is int and abs(value) >= 2**256
            _require(not is_huge, where, "an integer of 2**256 or more", "a smaller one")


def check_count(value: Any, where: str, most: float = math.inf) -> None:
    """Check that a value from a checkpoint is an integer from 0 to `most`.

    Args:
        value: the value to check.
        where: the name of the value in the error message.
        most: the largest allowed integer.

    Raises:
        UnexpectedContentError: if the value is anything else.
    """
    _check_type(value, int, where)
    wanted = "a count" if most == math.inf else f"a count of at most {most}"
    _require(0 <= value <= most, where, "a negative or too large number", wanted)


def _items(value: Any, like: Any, where: str) -> list[tuple[str, Any, Any]]:
    """Return (name, item, form) for each item of the dict, list or tuple `value`; the forms are taken from `like`."""
    if isinstance(like, dict) and str in like:
        _require(all(type(key) is str for key in value), where, "a dict with other keys", "a dict with names as keys")
        return [(reprlib.repr(key), item, like[str]) for key, item in value.items()]
    if isinstance(like, dict):
        missing = [key for key in like if key not in value]
        unknown = [key for key in value if key not in like]
        differences = [f"without {_shown(missing)}"] * bool(missing) + [f"with {_shown(unknown)}"] * bool(unknown)
        _require(not differences, where, " and ".join(differences), "what this run needs")
        return [(str(key), value[key], wanted) for key, wanted in like.items()]
    if isinstance(like, list):
        return [(str(index), item, like[0]) for index, item in enumerate(value)]
    _require(len(value) == len(like), where, f"{len(value)} values", str(len(like)))
    return [(str(index), *pair) for index, pair in enumerate(zip(value, like, strict=True))]


def _check_type(value: Any, wanted: type, where: str) -> None:
    allowed = (float, int) if wanted is float else (wanted,)
    _require(wanted is object or type(value) in allowed, where, type(value).__name__, wanted.__name__)
    _require(type(value) is not float or not math.isnan(value), where, "NaN", "a number")


def _check_tensor(value: Any, spec: TensorSpec, where: str) -> None:
    _check_type(value, torch.Tensor, where)
    same = value.dtype == spec.dtype or {str(value.dtype), str(spec.dtype)} <= _INTERCHANGEABLE
    got, wanted = ((str(each.dtype).removeprefix("torch."), list(each.shape)) for each in (value, spec))
    same = same and value.dim() == len(spec.shape)
    same = same and all(size in (length, None) for length, size in zip(value.shape, spec.shape, strict=True))
    _require(same, where, f"{got[0]} {reprlib.repr(got[1])}", f"{wanted[0]} {wanted[1]}")
    plain = value.layout == torch.strided and value.device.type == "cpu" and value.is_contiguous()
    plain = plain and not value.requires_grad and not value.is_neg() and not value.is_conj()
    _require(plain, where, "a view", "a contiguous tensor")
    _require(bool(value.isfinite().all()), where, "not finite", "finite")


def _require(ok: bool, where: str, got: str, wanted: str) -> None:
    if not ok:
        raise UnexpectedContentError(f"{where}: {got} instead of {wanted}")


def _shown(keys: list[Any]) -> str:
    return ", ".join(reprlib.repr(key) for key in keys[:3]) + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")
