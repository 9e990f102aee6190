"""State dicts with the versions of their modules, of which a module changes older ones when it loads them.

`torch.nn.Module.state_dict` has the versions in an attribute, `_metadata`, that new dicts and safetensors files lose.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Mapping
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
