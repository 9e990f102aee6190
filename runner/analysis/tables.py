"""A comparison of runs as tables for a terminal, as Markdown, as CSV and as JSON."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from rich.console import Console, Group
from rich.table import Table

from runner.analysis.comparison import BEST, LAST, RATE, SECONDS, STEPS, Comparison, Failure, Row
from runner.analysis.output import csv_text
from runner.config.overrides import as_typed
from runner.system.secrets import printable
from runner.system.tables import table

COMPARED = (BEST, LAST, STEPS, SECONDS, RATE)
"""The measures that `runner compare` shows."""


class TextTable(NamedTuple):
    """A table of texts."""

    titles: list[str]
    rows: list[list[str]]
    caption: str = ""

    def rich(self) -> Table:
        """Return the table for a terminal."""
        return table(self.caption, self.titles, self.rows, title_style="bold red")

    def markdown(self) -> str:
        """Return the table as Markdown."""
        lines = [self.titles, ["---"] * len(self.titles), *self.rows]
        escaped = [[cell.replace("|", "\\|").replace("\n", " ") for cell in line] for line in lines]
        return "\n".join(([f"{self.caption}:", ""] if self.caption else []) + [f"| {' | '.join(c)} |" for c in escaped])


def terminal(comparison: Comparison, width: int) -> Group:
    """Return the tables of a comparison for a terminal of `width` characters.

    If the terminal is too narrow for a column per config key, a single column lists the keys and values of a row.
    """
    whole, *others = (table.rich() for table in text_tables(comparison))
    console = Console(width=10_000)
    if comparison.keys and comparison.rows and console.measure(whole).minimum > width:
        whole = text_tables(comparison, in_one_column=True)[0].rich()
    return Group(whole, *others)


def markdown(comparison: Comparison) -> str:
    """Return the tables of a comparison as Markdown."""
    return "\n\n".join(table.markdown() for table in text_tables(comparison)) + "\n"


def text_tables(comparison: Comparison, in_one_column: bool = False) -> list[TextTable]:
    """Return a table of the runs that are done and a table of those that are not, each only if it is not empty.

    The keys of the config have a column each, or only one, `options`, with the keys and values of each row.
    """
    measures = [name for name in COMPARED if name in comparison.measures]
    keys = list(map(format_value, comparison.keys))
    rows = []
    for row in comparison.rows:
        values = _values(comparison, row)
        listed = "\n".join(f"{key}={value}" for key, value in zip(keys, values, strict=True) if value)
        cells = [_count(row), *(_cell(row, name) for name in measures)]
        rows.append([*([listed] if in_one_column else values), *cells])
    titles = [*(["options"] if in_one_column else keys), "runs", *map(comparison.title, measures)]
    failed = [[f.run, f.state, "" if f.step is None else str(f.step), f.reason] for f in comparison.failures]
    caption = f"{len(failed)} {'run is' if len(failed) == 1 else 'runs are'} not done"
    tables = TextTable(titles, rows), TextTable(["run", "state", "step", "reason"], failed, caption)
    return [table for table in tables if table.rows]


def format_value(value: object) -> str:
    """Return a config value as the user types it."""
    return printable(as_typed(value))


def _values(comparison: Comparison, row: Row | Failure) -> list[str]:
    return [format_value(row.values[key]) if key in row.values else "" for key in comparison.keys]


def _count(row: Row) -> str:
    """Return the number of runs and, if some of them have the same seed, the number of seeds, such as `3 (2 seeds)`."""
    runs, seeds = len(row.runs), row.seeds
    return str(runs) if seeds == runs else f"{runs} ({seeds} {'seed' if seeds == 1 else 'seeds'})"


def _cell(row: Row, measure: str) -> str:
    spread = row.measures.get(measure)
    if spread is None:
        return ""
    return f"{spread.mean:.0f}" if measure == STEPS and not spread.deviation > 0 else str(spread)


# ---------------------------------------------------------------------------------------------------------------------
# For programs


def as_csv(comparison: Comparison) -> str:
    """Return a CSV table with a line for each run that is done, in the order of the rows, and for each failure."""
    measures, keys = comparison.measures, list(map(format_value, comparison.keys))
    titles = [comparison.title(name) if name in (BEST, LAST) else name for name in measures]
    lines: list[list[Any]] = [[*keys, "seed", *titles, "run", "state", "step", "reason"]]
    for row in comparison.rows:
        for run in row.runs:
            numbers, name = comparison.measured(run), comparison.name(run.directory)
            found = [numbers.get(measure, "") for measure in measures]
            lines.append([*_values(comparison, row), run.labels.get("seed", ""), *found, name, "done", "", ""])
    for f in comparison.failures:
        step = "" if f.step is None else f.step
        lines.append([*_values(comparison, f), "", *[""] * len(measures), f.run, f.state, step, f.reason])
    return csv_text(lines)


def as_json(comparison: Comparison) -> str:
    """Return the comparison as JSON text, with all numbers unrounded; those that are not finite are null.

    `keys`, `metric` and `direction` are those of `Comparison`. Each of `rows` has its `values`, the numbers of `runs`
    and of different `seeds`, the run `directories`, and for each measure null or an object with `mean` and `std`. Each
    of `failures` has the fields of `Failure`.
    """
    measures = [name for name in COMPARED if name in comparison.measures]
    rows = []
    for row in comparison.rows:
        spreads = {name: row.measures.get(name) for name in measures}
        numbers = {name: spread and {"mean": spread.mean, "std": spread.deviation} for name, spread in spreads.items()}
        directories = {"directories": [str(run.directory) for run in row.runs]}
        rows.append({"values": row.values, "runs": len(row.runs), "seeds": row.seeds, **numbers, **directories})
    head = {"keys": comparison.keys, "metric": comparison.metric, "direction": comparison.direction}
    content = head | {"rows": rows, "failures": [failure._asdict() for failure in comparison.failures]}
    text = json.dumps(content, default=str)  # in ASCII, with numbers such as NaN that JSON does not have
    return json.dumps(json.loads(text, parse_constant=lambda number: None), indent=2) + "\n"
