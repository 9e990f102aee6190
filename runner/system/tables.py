"""Tables for a terminal, drawn with rich, and the numbers in them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text


def table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Iterable[Any]],
    right_from: int | None = None,
    title_style: str = "bold",
) -> Table:
    """Return a table, below an empty line and `title` if there is one; None is shown as a dash.

    The head is left out if no column has a name. Columns from the index `right_from` on are aligned to the right.
    """
    box = SIMPLE_HEAD if any(columns) else None
    found = Table(title=title and f"\n{title}", title_justify="left", title_style=title_style, box=box)
    found.show_header = any(columns)
    for index, column in enumerate(columns):
        to_right = right_from is not None and index >= right_from
        found.add_column(Text(column), overflow="fold", justify="right" if to_right else "left")
    for row in rows:
        # Text, so that brackets are not parsed as markup.
        found.add_row(*(Text("–" if value is None else str(value)) for value in row))
    return found


def pairs(title: str, values: Mapping[str, Any]) -> Table:
    """Return a table of names and values."""
    return table(title, ["", ""], values.items())


def significant(value: float, digits: int = 4) -> str:
    """Return `value` as text rounded to `digits` significant digits, but keep all digits before the decimal point.

    Zeros at the end of a fraction are left out. Examples: `12.35`, `1,234,567`, `0.0012`, `inf`.
    """
    if not math.isfinite(value):
        return str(value)
    power = math.floor(math.log10(abs(value))) if value else 0
    text = f"{value:,.{max(0, digits - 1 - power)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def milliseconds(seconds: float) -> str:
    """Return `seconds` in milliseconds, such as `12.3 ms`."""
    return f"{significant(seconds * 1e3)} ms"


def size(num_bytes: float) -> str:
    """Return `num_bytes` as text with a decimal unit, such as `12.4 MB`."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= factor * 0.9995:
            return f"{num_bytes / factor:,.{1 if num_bytes < factor * 100 else 0}f} {unit}"
    return f"{num_bytes:.0f} B"


def flops(count: float) -> str:
    """Return `count`, a number of floating-point operations, as text with a unit, such as `4.1 GFLOP`."""
    for unit, factor in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if count >= factor:
            return f"{significant(count / factor, 3)} {unit}FLOP"
    return f"{count:,.0f} FLOP"
