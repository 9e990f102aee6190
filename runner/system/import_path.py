"""Which code Python imports: this copy of the project, optional packages, and the user's own modules."""

from __future__ import annotations

import os
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_INSTALLED = ("site-packages", "dist-packages")


def is_installed(package: str) -> bool:
    """Return whether `package` is installed. A directory of this name without `__init__.py` does not count."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None


def python_path() -> dict[str, str]:
    """Return environment variables that let Python import this project, but no modules in the current directory."""
    paths = [*([] if _ROOT.name in _INSTALLED else [str(_ROOT)]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}


@contextmanager
def exported() -> Iterator[None]:
    """A context manager in which new processes get the environment variables of `python_path`."""
    variables = python_path()
    before = {name: os.environ[name] for name in variables if name in os.environ}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]
        os.environ.update(before)


def last_user_frame(error: BaseException) -> str:
    """Return the last frame of the user's code in the traceback of `error`, as Python prints it; empty if none."""
    libraries = (Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib"))
    others = [_ROOT / "runner", _ROOT / "models", *libraries]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        installed = any(name in path.parts for name in _INSTALLED) or frame.filename.startswith("<")
        if not installed and not any(path.is_relative_to(other) for other in others):
            return "".join(traceback.format_list([frame]))
    return ""
