"""The key of an override that is typed on the command line as `KEY=VALUE`, and its text without what may vary."""

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
