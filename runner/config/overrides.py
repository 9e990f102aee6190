"""The key and the value of an override, which is typed on the command line as `KEY=VALUE`."""

from __future__ import annotations

import re

_QUOTED = re.compile(r"""(['"])([\w.+-]+)\1""")


def override_key(override: str) -> str:
    """Return the key or the config group of an override, without its prefix (`+`, `++` or `~`).

    The package of a config group is kept: `optimizer@other=sgd` has the key `optimizer@other`.
    """
    return override.lstrip("+~").partition("=")[0]


def canonical_override(override: str) -> str:
    """Return an override without `+` and without needless quotes: `++seed='1'` is `seed=1`. `~seed` is not changed."""
    return _QUOTED.sub(r"\2", override.lstrip("+"))


def as_typed(value: object) -> str:
    """Return the text of a config value as it is typed in an override: `null`, `true`, `0.1`, `[16,32]`."""
    if isinstance(value, list | tuple):
        return f"[{','.join(map(as_typed, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{as_typed(inner)}' for key, inner in value.items())}}}"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
