"""Which code Python imports: this copy of the project, and optional packages."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_INSTALLED = (_ROOT / "runner" / "conf").is_dir()  # and not a source tree


def is_installed(package: str) -> bool:
    """Return whether `package` is installed. A directory of this name without `__init__.py` does not count."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None


def python_path() -> dict[str, str]:
    """Return environment variables that let Python import this project, but no modules in the current directory."""
    roots = [] if _ROOT.name in ("site-packages", "dist-packages") else [str(_ROOT)]
    paths = [*roots, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}


def import_also(folder: str) -> None:
    """Let Python import modules in `folder` that are neither of the standard library nor installed.

    They come before `tests`, `models` and other folders of the source tree, where an editable install finds `runner`.
    """
    if folder not in sys.path:
        sys.path.append(folder)
    if not _INSTALLED and folder != str(_ROOT):
        ours = [path for path in sys.path if path == str(_ROOT)]
        sys.path[:] = [path for path in sys.path if path != str(_ROOT)] + ours[:1]
