"""Tables for a terminal, drawn with rich."""

from __future__ import annotations

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
