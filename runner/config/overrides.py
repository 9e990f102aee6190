"""The parts of an override, `KEY=VALUE`, as it is typed."""

from __future__ import annotations


def override_key(override: str) -> str:
    """Return the key or the config group of an override, without its prefix (`+`, `++` or `~`)."""
    return override.lstrip("+~").partition("=")[0]
