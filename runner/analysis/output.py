"""Prints and writes the results of subcommands."""

from __future__ import annotations

import csv
import io
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.config.errors import check, shortened
from runner.storage.files import check_readable
from runner.system.secrets import printable

if TYPE_CHECKING:
    from rich.console import RenderableType


def print_report(report: dict[str, Any], as_json: bool, render: Callable[[dict[str, Any]], RenderableType]) -> None:
    """Print `report` as JSON if `as_json` is True; otherwise print the tables that `render` returns for it.

    The tables are as wide as the terminal, or 140 characters wide if standard output is not a terminal.
    """
    from rich.console import Console

    if as_json:
        print(json.dumps(report, indent=2))
    else:
        Console(width=None if sys.stdout.isatty() else 140).print(render(report), crop=False)


def one_line(text: str, most: int = 200) -> str:
    """Return `text` on one line, shortened to `most` characters, with control characters escaped."""
    return shortened(printable(" ".join(text.split())), most)


def csv_text(lines: Iterable[Iterable[Any]]) -> str:
    """Return a CSV table with these lines, with `'` before a text that a spreadsheet would take for a formula.

    https://owasp.org/www-community/attacks/CSV_Injection
    """
    table = csv.writer(file := io.StringIO(), lineterminator="\n")
    for line in lines:
        table.writerow(f"'{cell}" if isinstance(cell, str) and _is_formula(cell) else cell for cell in line)
    return printable(file.getvalue())


def _is_formula(text: str) -> bool:
    if not text.startswith(("=", "+", "-", "@", "\t", "\r")):
        return False
    try:
        float(text)
    except ValueError:
        return True
    return False


def check_writable(flag: str, value: str | None, suffix: str = "") -> None:
    """Check that the file `value` that a flag names, with `suffix`, can be created or replaced; None: it is absent.

    Raises:
        ConfigError: for a directory, a link, a pipe, a device, another suffix, or a file in a directory that is absent.
    """
    if value is None:
        return
    path = Path(os.path.expanduser(value))
    check_readable(flag, path)
    check(not path.is_dir(), flag, value, "it is a directory", "name a file")
    usual = not os.path.lexists(path) or (path.is_file() and not path.is_symlink())
    check(usual, flag, value, "it is a link, a pipe or a device, in whose place the file would be put", "name a file")
    check(path.parent.is_dir(), flag, value, "there is no such directory", f"mkdir -p {shlex.quote(str(path.parent))}")
    why = f"it is written as {suffix[1:].upper()}"
    check(not suffix or path.suffix.lower() == suffix, flag, value, why, f"name a {suffix} file")
