"""Prints the result of a tool."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from rich.console import Console, RenderableType


def print_report(report: dict[str, Any], as_json: bool, render: Callable[[dict[str, Any]], RenderableType]) -> None:
    """Print a result as JSON, or as the tables that `render` makes of it, as wide as the terminal."""
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        Console(width=None if sys.stdout.isatty() else 140).print(render(report))
