"""Where in the user's code an error was raised."""

from __future__ import annotations

import os
import sysconfig
import traceback
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_LIBRARIES = tuple(
    f"{path}{os.sep}"
    for path in (_ROOT / "runner", _ROOT / "models", *map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib")))
)


def is_library(file: str) -> bool:
    """Return whether a source file is part of this project, of Python or of an installed package."""
    installed = {"site-packages", "dist-packages"} & {*Path(file).parts}
    return file.startswith(("<frozen", "<string", "<eval", *_LIBRARIES)) or bool(installed)


def location(error: BaseException) -> str:
    """Return `mine.py:12`, the innermost line of user code in the traceback of `error`; empty if there is none."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{shown(error.filename)}:{error.lineno}"
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    ours = [f"{shown(file)}:{line}" for file, line in frames if not is_library(file)]
    return ours[-1] if ours else ""


def described(error: BaseException) -> str:
    """Return the type and the message of an error, and its `location`: `ValueError: negative (mine.py:12)`."""
    where = location(error)
    return f"{type(error).__name__}: {error}" + (f" ({where})" if where else "")


def shown(file: str) -> str:
    """Return the path of a file, relative to the working directory if it is below it."""
    path = Path(os.path.abspath(file)) if not file.startswith("<") else Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file
