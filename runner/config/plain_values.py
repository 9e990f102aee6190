"""Converts the composed config to plain values, without resolving its references to environment variables."""

from __future__ import annotations

import re
from typing import Any

from omegaconf import DictConfig, OmegaConf

_VARIABLE = re.compile(r"\$\{oc\.env:([^{}]*)\}")
_MARK = "\0env:{}\0"
_MARKED = re.compile("\0env:([^\0]*)\0")
_NEEDED = ("name", "output_root", "resume")
"""Config keys whose values are needed before any component is built."""


def resolved(config: DictConfig) -> dict[str, Any]:
    """Return `config` as plain values, with all interpolations resolved except references to environment variables.

    The text `${oc.env:NAME}` is kept until a component is built. It is also written to the files of a run instead of
    the value, because environment variables may hold passwords and tokens. In `name`, `output_root` and `resume`, such
    references are resolved too, and so are those in a text that has any other interpolation.

    Raises:
        OmegaConfBaseException: if an interpolation cannot be resolved.
    """
    raw: Any = OmegaConf.to_container(config, resolve=False)
    if "${oc.env:" not in str(raw):
        return OmegaConf.to_container(config, resolve=True)  # pyright: ignore[reportReturnType]
    raw = {key: value if key in _NEEDED else _marked(value) for key, value in raw.items()}
    return _unmarked(OmegaConf.to_container(OmegaConf.create(raw), resolve=True))


def _marked(value: Any) -> Any:
    """Replace references to environment variables with marks, except in texts that have any other interpolation."""
    if isinstance(value, str) and "${" not in _VARIABLE.sub("", value):
        return _VARIABLE.sub(lambda match: _MARK.format(match[1]), value)
    return _mapped(_marked, value)


def _unmarked(value: Any) -> Any:
    if isinstance(value, str):
        return _MARKED.sub(r"${oc.env:\1}", value)
    return _mapped(_unmarked, value)


def _mapped(function: Any, value: Any) -> Any:
    if isinstance(value, dict):
        return {key: function(inner) for key, inner in value.items()}
    return [function(inner) for inner in value] if isinstance(value, list) else value
