"""State dicts with the versions of their modules, of which a module changes older ones when it loads them, and buffers.

`torch.nn.Module.state_dict` has the versions in an attribute, `_metadata`, that new dicts and safetensors files lose.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from runner.storage.value_checks import check_like

_VERSIONS = "versions"
"""The key of the versions in the header of a safetensors file: JSON, a dict from names of modules to numbers."""


def with_versions(tensors: Mapping[str, Any], *sources: Any) -> dict[str, Any]:
    """Return a state dict of `tensors` with the versions of the first of `sources` that has some."""
    result: Any = OrderedDict(tensors)
    if (versions := next(filter(None, (getattr(each, "_metadata", None) for each in sources)), None)) is not None:
        result._metadata = versions
    return result


def renamed(tensors: Mapping[str, Any], rename: Callable[[str], str]) -> dict[str, Any]:
    """Return a state dict with other names of tensors, and of modules if `tensors` has versions.

    `rename` is called with the name of each tensor, and with that of each module and a dot: the prefix of its tensors.
    """
    result: Any = OrderedDict((rename(name), tensor) for name, tensor in tensors.items())
    if (versions := getattr(tensors, "_metadata", None)) is not None:
        result._metadata = OrderedDict(
            (rename(f"{name}." if name else "").removesuffix("."), each) for name, each in versions.items()
        )
    return result


def header(tensors: Mapping[str, Any]) -> dict[str, str]:
    """Return the entry for the versions in the header of a safetensors file with `tensors`."""
    versions: dict[str, dict[str, Any]] = getattr(tensors, "_metadata", None) or {}
    numbers = {name: each["version"] for name, each in versions.items() if type(each.get("version")) is int}
    return {_VERSIONS: json.dumps(numbers)} if numbers else {}


def read(file: Path) -> dict[str, Any]:
    """Return the state dict in a safetensors file, with the versions of its modules if it has them.

    Raises any exception if the content is damaged.
    """
    from safetensors import safe_open  # configs are checked without torch, which it imports
    from safetensors.torch import load_file

    tensors: Any = load_file(file)
    with safe_open(file, framework="pt") as opened:
        found = (opened.metadata() or {}).get(_VERSIONS)
    if found is not None:
        versions = json.loads(found)
        check_like(versions, {str: int}, _VERSIONS)
        tensors = OrderedDict(tensors)
        tensors._metadata = OrderedDict((name, {"version": number}) for name, number in versions.items())
    return tensors


def fitted(module: Any, tensors: Mapping[str, Any], weights: Mapping[str, Any]) -> dict[str, tuple[Any, str, Any]]:
    """Return, by name, the module, the key and a new buffer, without values, for each in `tensors` of another form.

    The shape of a buffer is data: forward may assign one to what was None, or let it grow. So is its dtype, unless the
    precision of the run, which that of its `weights` shows, is another one now.
    """
    import torch

    found: dict[str, tuple[Any, str, Any]] = {}
    dtypes = {(getattr(weights.get(name), "dtype", each.dtype), each.dtype) for name, each in module.named_parameters()}
    converted = {then for then, now in dtypes if then != now}
    for prefix, owner in module.named_modules():
        for key, buffer in owner._buffers.items():
            value = tensors.get(name := f"{prefix}.{key}" if prefix else key)
            if not isinstance(value, torch.Tensor):
                continue
            dtype = value.dtype if buffer is None or value.dtype not in converted else buffer.dtype
            if buffer is None or (buffer.shape, buffer.dtype) != (value.shape, dtype):
                held = chain([buffer], owner.parameters(), owner.buffers(), module.parameters(), module.buffers())
                device = next((each.device for each in held if each is not None), value.device)
                found[name] = owner, key, torch.empty(value.shape, dtype=dtype, device=device)
    return found


def fit_buffers(module: Any, tensors: Mapping[str, Any], weights: Mapping[str, Any]) -> None:
    """Give the buffers of `module` the forms that they have in `tensors` (see `fitted`)."""
    for owner, key, buffer in fitted(module, tensors, weights).values():
        owner._buffers[key] = buffer
