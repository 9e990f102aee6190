"""Checks of values from a checkpoint or a JSON file, before they are used: the source may be untrusted."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # results and ledgers are checked without torch
    import torch

COUNT = range(10**15 + 1)
"""The form of a count, for `check_like`: no run has more steps or samples."""

_BEYOND = 2**256
"""No saved integer has this absolute value; the states of random number generators have 128 bits."""

_INTERCHANGEABLE = {"torch.float32", "torch.float64"}, {"torch.complex64", "torch.complex128"}
"""The dtypes of parameters: a run that saved one of a pair may be resumed with the other."""


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

    - a tensor or a `TensorSpec`: the value must be a tensor of this shape and dtype, and finite if that tensor is;
    - a dict or a tuple: the same keys or length, and each item must have the form of the item in `like`;
    - `{str: form}` or `[form]`: a dict with strings as keys or a list, of any length, with items of this form;
    - a range: an int in it;
    - a type: exactly this type, and not NaN; `float` also allows an int, and `object` allows everything.

    Only the parts that `like` describes are examined, so a deep or cyclic value does no harm.

    Raises:
        UnexpectedContentError: if `value`, which the message calls `where`, has another form.
    """
    if isinstance(like, TensorSpec):
        _check_tensor(value, like, where)
    elif isinstance(like, type):
        fits = like is object or type(value) is like or (like is float and type(value) is int)
        _require(fits, where, type(value).__name__, like.__name__)
        is_number = type(value) is not float or not math.isnan(value)
        _require(is_number and (type(value) is not int or abs(value) < _BEYOND), where, "NaN or too large", "a number")
    elif isinstance(like, range):
        got = "another number" if type(value) is int else type(value).__name__
        _require(type(value) is int and value in like, where, got, f"an int from {like.start} to {like.stop - 1}")
    elif not isinstance(like, dict | list | tuple):
        _check_tensor(value, TensorSpec(like.dtype, tuple(like.shape)), where, like)
    else:
        _require(type(value) is type(like), where, type(value).__name__, type(like).__name__)
        if isinstance(like, dict):
            forms = {key: like[str] for key in value if type(key) is str} if str in like else like
            others = sorted(map(reprlib.repr, value.keys() ^ forms.keys()))
            _require(not others, where, f"other keys ({', '.join(others[:3])})", "those of this run")
            items = [(reprlib.repr(key), value[key], form) for key, form in forms.items()]
        else:
            forms = like * len(value) if isinstance(like, list) else like
            _require(len(value) == len(forms), where, f"{len(value)} values", str(len(forms)))
            items = [(str(index), *pair) for index, pair in enumerate(zip(value, forms, strict=True))]
        for name, item, form in items:
            check_like(item, form, f"{where}, {name}")


def check_known(value: Any, forms: Mapping[str, Any], required: Collection[str], where: str) -> None:
    """Check that `value` is a dict with the keys `required`, and each of its values that is in `forms` has its form.

    Raises:
        UnexpectedContentError: as in `check_like`.
    """
    check_like(value, dict, where)
    for key in required:
        _require(key in value, where, f"no {key}", "one")
    for key in forms:
        if key in value:
            check_like(value[key], forms[key], f"{where}, {key}")


def is_finite(tensor: torch.Tensor) -> bool:
    """Return whether no element is NaN or infinite."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    wide = tensor.float() if tensor.dtype.itemsize == 1 else tensor  # torch adds no float8
    return bool(wide.sum().isfinite()) or bool(wide.isfinite().all())  # a sum is faster, but may overflow


def _check_tensor(value: Any, spec: TensorSpec, where: str, like: torch.Tensor | None = None) -> None:
    import torch

    _require(type(value) is torch.Tensor, where, type(value).__name__, "Tensor")
    dtypes = {str(value.dtype), str(spec.dtype)}
    fits = len(dtypes) == 1 or any(dtypes <= pair for pair in _INTERCHANGEABLE)
    fits = fits and value.dim() == len(spec.shape)
    fits = fits and all(size in (length, None) for length, size in zip(value.shape, spec.shape, strict=True))
    _require(fits, where, f"{value.dtype} {reprlib.repr(list(value.shape))}", f"{spec.dtype} {list(spec.shape)}")
    plain = value.layout == torch.strided and value.device.type == "cpu" and value.is_contiguous()
    _require(plain and not value.requires_grad, where, "a view", "a contiguous tensor")
    _require(is_finite(value) or not (like is None or is_finite(like)), where, "not finite", "finite")


def _require(ok: bool, where: str, got: str, wanted: str) -> None:
    if not ok:
        raise UnexpectedContentError(f"{where}: {got} instead of {wanted}")
