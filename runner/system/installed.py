"""Whether an optional package is installed."""

from importlib.util import find_spec


def is_installed(package: str) -> bool:
    """Return whether `package` is installed. A directory of this name without `__init__.py` does not count."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None
