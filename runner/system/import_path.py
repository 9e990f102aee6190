"""The import path of new Python processes, which have to import this copy of the project and no other."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def python_path() -> dict[str, str]:
    """Return environment variables that let Python import this project, but no modules in the current directory."""
    root = Path(__file__).parents[2]
    installed = root.name in ("site-packages", "dist-packages")  # as opposed to a checkout
    paths = [*([] if installed else [str(root)]), *filter(None, [os.environ.get("PYTHONPATH")])]
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
