"""Functions that convert a comparison of runs to tables for a terminal, to Markdown, to CSV and to JSON."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from runner.analysis.compare_rows import BEST, LAST, RATE, STEPS, Comparison, Row
from runner.analysis.output import csv_row, one_line
from runner.analysis.plot_tables import format_value, plus_minus
from runner.system.utf8 import printable
from runner.tracking.mean_std import Spread

_FAILURE_TITLES: list[str] = ["run", "state", "step", "reason"]


def terminal(comparison: Comparison, width: int) -> Group:
    """Return, for a terminal, a table of the runs that are done and a table of the runs that are not done.

    A table without rows is left out. If the terminal is too narrow for a column per config key, a single column
    `options` lists the keys and values of a row below one another.

    Args:
        comparison: the comparison.
        width: the number of characters that a line of the terminal has.
    """
    tables, count = _tables(comparison), len(comparison.keys)
    if comparison.rows and count and _readable_width(*tables[0][:2]) > width:
        titles, rows, caption = tables[0]
        named = [zip(titles[:count], row, strict=False) for row in rows]
        options = ["\n".join(f"{key}={value}" for key, value in pairs if value) for pairs in named]
        shorter = [[listed, *row[count:]] for listed, row in zip(options, rows, strict=True)]
        tables[0] = (["options", *titles[count:]], shorter, caption)
    parts: list[RenderableType] = []
    for titles, rows, caption in tables:
        table = Table(box=SIMPLE_HEAD, title=caption, title_justify="left", title_style="bold red")
        for title in titles:
            table.add_column(Text(title), overflow="fold")
        for row in rows:
            table.add_row(*map(Text, row))
        parts.append(table)
    return Group(*parts)


def _readable_width(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> int:
    """Return the smallest width of the table, in characters, at which no word of up to 40 characters is broken."""
    columns = zip(titles, *rows, strict=True)
    words = [max(cell_len(word) for cell in column for word in cell.split() or [""]) for column in columns]
    return sum(min(word, 40) + 3 for word in words)  # 3: the space between two columns


def markdown(comparison: Comparison) -> str:
    """Return the tables of `terminal` as Markdown text, always with one column per config key."""
    blocks = []
    for titles, rows, caption in _tables(comparison):
        lines = [_markdown_line(titles), _markdown_line(["---"] * len(titles)), *map(_markdown_line, rows)]
        blocks.append("\n".join(([f"{caption}:", ""] if caption else []) + lines) + "\n")
    return "\n".join(blocks)


def _markdown_line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|').replace(chr(10), ' ') for cell in cells)} |"


def _tables(comparison: Comparison) -> list[tuple[list[str], list[list[str]], str]]:
    """Return the titles, the rows and the caption of each table that is not empty."""
    titles = [*map(format_value, comparison.keys), "runs", *(_title(comparison, name) for name in comparison.measures)]
    done = [
        [*_values(comparison, row.values), _count(row), *(_cell(row, name) for name in comparison.measures)]
        for row in comparison.rows
    ]
    failed = [[f.name, f.state, "" if f.step is None else str(f.step), f.reason] for f in comparison.failures]
    count = len(failed)
    caption = f"{count} {'run is' if count == 1 else 'runs are'} not done"
    tables = [(titles, done, ""), (_FAILURE_TITLES, failed, caption)]
    return [table for table in tables if table[1]]


def _count(row: Row) -> str:
    """Return the number of runs and, if some of them have the same seed, the number of seeds, such as `3 (2 seeds)`."""
    runs, seeds = len(row.runs), row.seeds
    return str(runs) if seeds == runs else f"{runs} ({seeds} {'seed' if seeds == 1 else 'seeds'})"


def _title(comparison: Comparison, measure: str) -> str:
    titles = {BEST: f"best {comparison.metric}", LAST: f"last {comparison.metric}", RATE: "samples/s"}
    return one_line(titles.get(measure, measure))


def _values(comparison: Comparison, values: dict[str, Any]) -> list[str]:
    return [format_value(values[key]) if key in values else "" for key in comparison.keys]


def _cell(row: Row, measure: str) -> str:
    spread = row.spread(measure)
    if spread is None:
        return ""
    same = len(set(row.measures[measure])) == 1
    return f"{spread.mean:.0f}" if measure == STEPS and same else plus_minus(spread)


# ---------------------------------------------------------------------------------------------------------------------
# For programs


def as_csv(comparison: Comparison) -> str:
    """Return one CSV table, which has a line for each row of the comparison and a line for each failure.

    The standard deviation of each measure has its own column, with the suffix `_std`.
    """
    names = comparison.measures
    titles = [_title(comparison, name) if name in (BEST, LAST) else name for name in names]
    keys = [format_value(key) for key in comparison.keys]
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    ends = (f"{title}{end}" for title in titles for end in ("", "_std"))
    writer.writerow(csv_row([*keys, "runs", *ends, *_FAILURE_TITLES]))
    for row in comparison.rows:
        spreads = [row.spread(name) for name in names]
        numbers = ["" if n is None or math.isnan(n) else n for spread in spreads for n in spread or (None, None)]
        writer.writerow(csv_row([*_values(comparison, row.values), len(row.runs), *numbers, "", "done", "", ""]))
    for f in comparison.failures:
        empty = [""] * (1 + 2 * len(names))
        step = "" if f.step is None else f.step
        writer.writerow(csv_row([*_values(comparison, f.values), *empty, f.name, f.state, step, f.reason]))
    return file.getvalue()


def as_json(comparison: Comparison) -> str:
    """Return the comparison as JSON text, with all numbers unrounded.

    Returns:
        The text of a JSON object, in which numbers that are not finite are null. It has these keys:

        - `keys`, `metric` and `direction`: the attributes of `Comparison` with these names.
        - `rows`: a list with an object for each row. Its keys are `values`, `runs` (the number of runs), `seeds` (the
          number of different seeds), `directories` (the run directories), and the name of each measure. The value of a
          measure is an object with the keys `mean` and `std`, or null if the row does not have this measure.
        - `failures`: a list with an object for each failure. Its keys are the fields of `Failure`, but `name` is
          called `run`.
    """
    content = {
        "keys": comparison.keys,
        "metric": comparison.metric,
        "direction": comparison.direction,
        "rows": [
            {
                "values": row.values,
                "runs": len(row.runs),
                "seeds": row.seeds,
                **{name: _spread(row.spread(name)) for name in comparison.measures},
                "directories": [str(run.directory) for run in row.runs],
            }
            for row in comparison.rows
        ],
        "failures": [
            {"run": f.name, "state": f.state, "step": f.step, "reason": f.reason, "values": f.values}
            for f in comparison.failures
        ],
    }
    return json.dumps(_plain(content), indent=2) + "\n"


def _spread(spread: Spread | None) -> dict[str, float | None] | None:
    return spread and {"mean": spread.mean, "std": spread.deviation}


def _plain(value: Any) -> Any:
    """Return `value` in types that JSON supports: numbers that are not finite become None, and dates become text."""
    if isinstance(value, dict):
        return {printable(str(key)): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, int) else printable(str(value))
