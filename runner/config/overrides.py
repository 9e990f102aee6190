"""Finds the key of an override that is typed on the command line as `KEY=VALUE`."""

from __future__ import annotations


def override_key(override: str) -> str:
    """Return the key or the config group of an override, without its prefix (`+`, `++` or `~`).

    The package of a config group is kept: `optimizer@other=sgd` has the key `optimizer@other`.
    """
    return override.lstrip("+~").partition("=")[0]
