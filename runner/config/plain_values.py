"""Converts the composed config to plain values, without resolving its references to environment variables."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from typing import Any

from omegaconf import DictConfig, OmegaConf

from runner.config.overrides import LOCATION_KEYS

_BRACES = re.compile(r"\$\{(?P<variable>\s*oc\.env\s*:)?|[{}]")
"""A pattern for a brace; the group `variable` is the beginning of a reference to an environment variable."""
_MARK = secrets.token_hex(8)
"""A random text, which no config contains. It replaces the `$` of references that OmegaConf must not resolve."""


def resolved(config: DictConfig) -> dict[str, Any]:
    """Return `config` as plain values, with all interpolations resolved except references to environment variables.

    A reference is kept as the text `${oc.env:NAME}` until a component is built. The files of a run contain this text
    instead of the value, because environment variables may hold passwords and tokens. Two kinds of references are
    resolved nevertheless:

    - references in the values of `name`, `output_root` and `resume`;
    - references inside an interpolation other than `oc.env`, as in `${oc.decode:${oc.env:NAME}}`.

    Raises:
        OmegaConfBaseException: if an interpolation cannot be resolved.
    """
    raw: Any = OmegaConf.to_container(config, resolve=False)
    if "oc.env" not in str(raw):
        return OmegaConf.to_container(config, resolve=True)  # pyright: ignore[reportReturnType]
    raw = {key: value if key in LOCATION_KEYS else _mapped(_marked, value) for key, value in raw.items()}
    return _mapped(lambda text: text.replace(_MARK, "$"), OmegaConf.to_container(OmegaConf.create(raw), resolve=True))


def _marked(text: str) -> str:
    """Return `text` with a mark in each reference to an environment variable.

    Those inside an interpolation other than `oc.env`, such as `${oc.decode:${oc.env:NAME}}`, get no mark.
    """
    kept: list[bool] = []
    """An item per open brace: False if it begins an interpolation that is resolved, otherwise True."""

    def mark(brace: re.Match[str]) -> str:
        if brace[0] == "}":
            if kept:
                kept.pop()
            return brace[0]
        is_marked = brace["variable"] is not None and all(kept)
        if brace[0] != "{" or kept:  # otherwise, it is a brace of the text
            kept.append(is_marked or brace[0] == "{")
        return brace[0].replace("$", _MARK) if is_marked else brace[0]

    return _BRACES.sub(mark, text)


def _mapped(function: Callable[[str], str], value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _mapped(function, inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_mapped(function, inner) for inner in value]
    return function(value) if isinstance(value, str) else value
