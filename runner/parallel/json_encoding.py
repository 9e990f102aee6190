"""The encoding of values that are sent to other ranks: JSON, because pickle can execute code from the sender.

Plain JSON values are written unchanged; any other value is written with a tag for its type, as `{"$": [tag, content]}`.
Pickle is used only in the pipes of `multiprocessing` between a process and the processes that it starts. This is safe,
because no other process can open these pipes.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import torch

from runner.config.errors import ABSENT, ConfigError

_TAG = "$"


def encode(value: Any) -> bytes:
    """Return `value` as JSON text in bytes.

    Args:
        value: None, a bool, int, float, string, path, dtype, tensor or `ConfigError`; a named tuple or dataclass of
            this project that has no `__post_init__`; or a list, tuple or dict of such values.

    Raises:
        TypeError: for any other type.
    """
    return json.dumps(_to_json(value), separators=(",", ":")).encode()


def decode(message: bytes) -> Any:
    """Return the value that was encoded as `message`; its tensors are on the CPU.

    Raises:
        ValueError: if `message` is not JSON, or was not made by `encode`.
    """
    try:
        return _from_json(json.loads(message))
    except (AttributeError, KeyError, RuntimeError, TypeError) as error:
        raise ValueError(f"a message from another rank cannot be decoded: {error}") from error


def _to_json(value: Any) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [_to_json(each) for each in value]
    if type(value) is dict and _TAG not in value and all(type(key) is str for key in value):
        return {key: _to_json(each) for key, each in value.items()}
    tag, content = _tagged(value)
    return {_TAG: [tag, content]}


def _tagged(value: Any) -> tuple[str, Any]:
    """Return the tag and the content that represent `value`, which is not a plain JSON value."""
    if type(value) in (tuple, dict):
        return type(value).__name__, [_to_json(each) for each in (value.items() if type(value) is dict else value)]
    if isinstance(value, Path):
        return "path", str(value)
    if isinstance(value, torch.dtype):
        return "dtype", str(value).removeprefix("torch.")
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        content = base64.b64encode(flat.numpy().tobytes()).decode()
        return "tensor", [_tagged(value.dtype)[1], list(value.shape), content]
    if isinstance(value, ConfigError):
        return "config error", [_to_json(each) for each in (value.key, _sendable(value.got), value.why, value.remedy)]
    if value is ABSENT:
        return "absent", None
    if (names := _fields(type(value))) is not None:
        name = f"{type(value).__module__}:{type(value).__qualname__}"
        return "object", [name, *(_to_json(getattr(value, each)) for each in names)]
    raise TypeError(f"a {type(value).__name__} cannot be sent to other ranks")


def _sendable(got: Any) -> Any:
    """Return `got` if it can be encoded, and its `repr` otherwise.

    `got` is the rejected value of a `ConfigError`, and is only displayed.
    """
    try:
        _to_json(got)
    except TypeError:
        return repr(got)
    return got


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_json(each) for each in value]
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {key: _from_json(each) for key, each in value.items()}
    tag, content = value[_TAG]
    return _READ[tag](content) if tag in _READ else _unknown(tag)


def _unknown(tag: object) -> Any:
    raise ValueError(f"a message from another rank contains an unknown tag, dtype or class: {tag!r}")


def _items(content: list[Any]) -> list[Any]:
    return [_from_json(each) for each in content]


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    return dtype if isinstance(dtype, torch.dtype) else _unknown(name)


def _tensor(content: list[Any]) -> torch.Tensor:
    dtype, shape, data = content
    values = torch.frombuffer(bytearray(base64.b64decode(data)), dtype=torch.uint8) if data else torch.empty(0)
    return (values.view(_dtype(dtype)) if data else values.to(_dtype(dtype))).reshape(shape)


def _object(content: list[Any]) -> Any:
    name, *values = content
    module, _, path = name.partition(":")
    cls = getattr(sys.modules.get(module), path, None)
    return cls(*_items(values)) if isinstance(cls, type) and _fields(cls) is not None else _unknown(name)


def _fields(cls: type) -> list[str] | None:
    """Return the field names of `cls` if it is a named tuple or dataclass of this project; otherwise, return None.

    None is also returned for classes with `__post_init__`, so that decoding a message does not call this method.
    """
    if cls.__module__.partition(".")[0] != "runner" or hasattr(cls, "__post_init__"):
        return None
    if dataclasses.is_dataclass(cls):
        return [each.name for each in dataclasses.fields(cls) if each.init]
    return list(getattr(cls, "_fields", ())) if issubclass(cls, tuple) else None


_READ = {
    "tuple": lambda content: tuple(_items(content)),
    "dict": lambda content: dict(_items(content)),
    "path": Path,
    "dtype": _dtype,
    "tensor": _tensor,
    "config error": lambda content: ConfigError(*_items(content)),
    "absent": lambda _: ABSENT,
    "object": _object,
}
