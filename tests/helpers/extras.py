"""Packages of the extras, which need not be installed."""

import importlib
import os
from typing import Any

import pytest


def require(name: str) -> Any:
    """Import a package; without it, skip the test, or fail if this is `make test-integrations`, which installs it."""
    if os.environ.get("RUNNER_INTEGRATIONS"):
        return importlib.import_module(name)
    return pytest.importorskip(name)
