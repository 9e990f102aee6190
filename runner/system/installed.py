"""Whether an optional package is installed."""

from importlib.util import find_spec


def is_installed(package: str) -> bool:
    """Return whether `import package` would find a package, and not only a directory of this name without code."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None
