"""A comparison of runs as tables for a terminal, as Markdown, as CSV and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from runner.analysis.comparison import BEST, LAST, RATE, STEP_SECONDS, STEPS, Comparison, Failure, Row, Spread
from runner.analysis.output import csv_text, one_line
from runner.analysis.significance import LEVEL, MAX_SEEDS, POWER, Contrast
from runner.config.overrides import as_typed
from runner.system.secrets import printable
from runner.system.tables import table

NOT_TOLD = "≈"
"""The mark of a row that cannot be told from the reference."""

_MAX_WIDTH = 60  # of a cell that is not wrapped, in characters


class TextTable(NamedTuple):
    titles: list[str]
    rows: list[list[str]]
    caption: str = ""

    def rich(self, is_narrow: bool = False) -> Table:
        """Return the table for a terminal; for a narrow one, only titles and its first column are wrapped."""
        titles = [title.replace(" ", "\n") for title in self.titles] if is_narrow else self.titles
        found = table(self.caption, titles, self.rows, title_style="bold red")
        for index, column in enumerate(found.columns if not self.caption else ()):
            column.max_width, column.no_wrap = _MAX_WIDTH, is_narrow and index > 0
        return found

    def markdown(self) -> str:
        lines = [self.titles, ["---"] * len(self.titles), *self.rows]
        escaped = [[cell.replace("|", "\\|").replace("\n", " ") for cell in line] for line in lines]
        return "\n".join(([f"{self.caption}:", ""] if self.caption else []) + [f"| {' | '.join(c)} |" for c in escaped])


def terminal(comparison: Comparison, width: int) -> Group:
    """Return the tables and the notes of a comparison for a terminal of `width` characters.

    If the terminal is too narrow for a column per config key, a single column lists the keys and values of a row; if it
    is too narrow for all measures, they continue in further tables.
    """
    parts = [part.rich() for part in text_tables(comparison)]
    if comparison.rows and _width(parts[0]) > width:
        parts[:1] = _in_blocks(text_tables(comparison, in_one_column=True)[0], width)
    return Group(*parts, *(Text(f"\n{note}") for note in notes(comparison)))


def _width(part: Table) -> int:
    return Console(width=10_000).measure(part).maximum


def _in_blocks(part: TextTable, width: int) -> Iterator[Table]:
    """Yield tables of at most `width` characters, if possible, with the first and some more columns of `part` each."""
    first, *rest = zip(part.titles, *part.rows, strict=True)
    while rest:
        tables = [[list(row) for row in zip(first, *rest[:count], strict=True)] for count in range(len(rest), 0, -1)]
        blocks = [TextTable(titles, rows) for titles, *rows in tables]
        chosen = next((block for block in blocks if _width(block.rich(is_narrow=True)) <= width), None)
        if chosen is None:  # intervals go below differences
            chosen = blocks[-1]._replace(rows=[[cell.replace(" [", "\n[") for cell in row] for row in blocks[-1].rows])
        yield chosen.rich(is_narrow=_width(chosen.rich()) > width)
        rest = rest[len(chosen.titles) - 1 :]


def markdown(comparison: Comparison) -> str:
    return "\n\n".join([*(table.markdown() for table in text_tables(comparison)), *notes(comparison)]) + "\n"


def text_tables(comparison: Comparison, in_one_column: bool = False) -> list[TextTable]:
    """Return a table of the runs that are done and a table of those that are not, each only if it is not empty.

    The keys of the config have a column each, or only one, `options`, with the keys and values of each row. If rows are
    compared, the table says how they differ from the reference.
    """
    measures = _shown(comparison)
    contrasts, keys = comparison.contrasts, list(map(format_value, comparison.keys))
    titles = [*(["options"] if in_one_column else keys), "runs", *map(comparison.title, measures)]
    verdicts = ["difference", "p", "seeds needed"][: 3 if any(not c.differs for c in contrasts.values()) else 2]
    rows = []
    for index, row in enumerate(comparison.rows):
        values = ["\n".join(row.options)] if in_one_column else _values(comparison, row, absent="–")
        cells = [*values, _count(row), *(_cell(row, name) for name in measures)]
        if contrasts:
            reference = ["the best" if comparison.against is None else "the reference"]
            reference *= row is comparison.reference
            found = _verdict(contrasts[index]) if index in contrasts else reference
            cells += [*found, "", "", ""][: len(verdicts)]
        rows.append(cells)
        cells += ["yes" if row in comparison.front else ""] * bool(comparison.front)
    titles += verdicts if contrasts else ["front"] * bool(comparison.front)
    failed = [[f.run, f.state, "" if f.step is None else str(f.step), one_line(f.reason)] for f in comparison.failures]
    caption = f"{len(failed)} {'run is' if len(failed) == 1 else 'runs are'} not done"
    tables = TextTable(titles, rows), TextTable(["run", "state", "step", "reason"], failed, caption)
    return [table for table in tables if table.rows]


# ---------------------------------------------------------------------------------------------------------------------
# Differences


def _verdict(found: Contrast) -> list[str]:
    """Return the cells of a contrast: the difference with its interval, p, and the number of seeds needed."""
    mark, needed = "" if found.differs else f"{NOT_TOLD} ", found.seeds_needed
    difference = f"{found.difference:+.{_decimals(found)}f}"
    if not math.isnan(found.low):
        difference += f" [{_limits(found, ', ')}]"
    seeds = "" if found.differs or found.p == 1 else f"> {MAX_SEEDS:,}" if needed is None else f"{needed:,}"
    return [mark + difference, _p(found.corrected_p), seeds]


def _decimals(found: Contrast) -> int:
    """Return the number of decimals that shows two digits of the interval, but at most five of the values."""
    width = abs(found.difference) if math.isnan(found.low) else found.high - found.difference
    size = max(width, max(map(abs, found.values)) / 10_000)
    return max(0, 1 - math.floor(math.log10(size))) if size else 1


def _limits(found: Contrast, between: str) -> str:
    return between.join(f"{limit:+.{_decimals(found)}f}" for limit in (found.low, found.high))


def _p(p: float) -> str:
    return "< 0.0001" if p < 1e-4 else f"{p:.2g}"


def notes(comparison: Comparison) -> list[str]:
    """Return which metric is meant, and what the differences mean or, with two rows or `against`, each of them."""
    contrasts, rows, found = comparison.contrasts, comparison.rows, list(filter(None, [comparison.meant]))
    if len(comparison.metrics) > 1:
        goals = ", ".join(one_line(f"{tag} ({goal})") for tag, goal in comparison.metrics.items())
        found.append(f"front: no other row is at least as good in each of {goals}, and better in one.")
        if without := len(rows) - comparison.num_comparable:
            found.append(f"Rows with fewer seeds, or of which a run lacks a metric, are not on it: {without}.")
    elif without := sum(
        comparison.quality not in comparison.measured(run)
        for row in rows
        if comparison.quality in row.measures
        for run in row.runs
    ):
        title = comparison.title(comparison.quality)
        found.append(f"Without a finite {title}, and so in no mean of it: {without} of the runs that are done.")
    single = sum(row.seeds < 2 for row in rows) if len(rows) > 1 else 0
    if single and single == len(rows):
        found.append(
            "Each row has one seed: nothing can be said about which is better. Repeat the runs: seed=0,1,2,3,4"
        )
    elif single:
        found.append(f"Rows with one seed, about which nothing can be said: {single} of {len(rows)}.")

    if len(contrasts) == 1 or (contrasts and comparison.against is not None):
        return found + [_sentence(comparison, rows[index], each) for index, each in contrasts.items()]
    if contrasts:
        best = "the best row" if comparison.reference is rows[0] else "the best row with several seeds"
        tests = " or ".join(sorted({each.test for each in contrasts.values()}))
        found.append(
            f"difference: of the mean {comparison.title(comparison.quality)} to {best}, with its 95 % confidence "
            f"interval; p: of the {tests}, corrected for all pairs of rows; {NOT_TOLD}: cannot be told from {best}; "
            f"seeds needed: of each row, to find a difference of this size with a probability of {POWER * 100:g} %."
        )
    return found


def _sentence(comparison: Comparison, row: Row, found: Contrast) -> str:
    assert comparison.reference is not None
    metric, names = comparison.title(comparison.quality), [row.options, comparison.reference.options]
    of_one, of_other = (f"{Spread.of(each)} (n = {len(each)})" for each in (found.values, found.others))
    text = f"With {' '.join(names[0])}, the {metric} (mean ± standard deviation over seeds) is {of_one}, with "
    text += f"{' '.join(names[1])} {of_other}: a difference of {found.difference:+.{_decimals(found)}f} ("
    if not math.isnan(found.low):
        text += f"95 % confidence interval {_limits(found, ' to ')}; "
    text += f"{found.test}{' by seed' if found.is_paired else ''}, two-sided, p {'= ' * (found.corrected_p >= 1e-4)}"
    text += f"{_p(found.corrected_p)}{' by Holm' if len(comparison.contrasts) > 1 else ''}), which is "
    text += f"{'' if found.differs else 'not '}significant at the level of {LEVEL * 100:g} %."
    if not found.differs and (needed := found.seeds_needed):
        text += f" To find one of this size with a probability of {POWER * 100:g} % takes {needed:,} seeds each."
    left_out = sum(each.values in (row.values, comparison.reference.values) for each in comparison.failures)
    return text + (f" Runs left out, as they are not done: {left_out}." if left_out else "")


def format_value(value: object) -> str:
    """Return a config value as the user types it."""
    return printable(as_typed(value))


def _shown(comparison: Comparison) -> list[str]:
    """Return the measures in the table: without step times, and without the rate if it is one of the metrics."""
    left_out = (STEP_SECONDS, *([RATE] if "time/samples_per_second" in comparison.metrics else []))
    return [name for name in comparison.measures if name not in left_out]


def _values(comparison: Comparison, row: Row | Failure, absent: str = "") -> list[str]:
    return [format_value(row.values[key]) if key in row.values else absent for key in comparison.keys]


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


_NUMBERS = ("difference", "low", "high", "p", "seeds_needed")


def _numbers(found: Contrast) -> dict[str, float | None]:
    numbers = found.difference, found.low, found.high, found.corrected_p, found.seeds_needed
    return dict(zip(_NUMBERS, numbers, strict=True))


def as_csv(comparison: Comparison) -> str:
    """Return a CSV table with a line for each run that is done, in the order of the rows, and for each failure."""
    measures, keys = comparison.measures, list(map(format_value, comparison.keys))
    titles = [comparison.title(name) if name in (BEST, LAST, STEPS) else name for name in measures]
    front = ["front"] * (len(comparison.metrics) > 1)
    lines: list[list[Any]] = [[*keys, "seed", *titles, "run", "state", "step", "reason", *_NUMBERS, *front]]
    for index, row in enumerate(comparison.rows):
        contrast = comparison.contrasts.get(index)
        numbers = _numbers(contrast).values() if contrast else [None] * len(_NUMBERS)
        numbers = [None if number != number else number for number in numbers]  # NaN
        for run in row.runs:
            measured, name = comparison.measured(run), comparison.name(run.directory)
            found = [measured.get(measure) for measure in measures]
            seed = run.labels.get("seed")
            is_on = ["yes" if row in comparison.front else "no"][: len(front)]
            lines.append([*_values(comparison, row), seed, *found, name, "done", "", "", *numbers, *is_on])
    for f in comparison.failures:
        absent = [None] * (len(_NUMBERS) + len(front))
        lines.append([*_values(comparison, f), "", *[""] * len(measures), f.run, f.state, f.step, f.reason, *absent])
    return csv_text(lines)


def as_json(comparison: Comparison) -> str:
    """Return the comparison as JSON text, with all numbers unrounded; those that are not finite are null.

    `keys`, `metric` and `direction` are those of `Comparison`; with several metrics, there are `metrics`, too, whose
    tags are the keys of their numbers, and each row says whether it is on the `front`. Each of `rows` has its `values`,
    the numbers of `runs` and of different `seeds`, the run `directories`, for each measure null or an object with
    `mean` and `std`, and as its `contrast` null or its difference to the row whose values are `reference` (see
    `Contrast`). Each of `failures` has the fields of `Failure`; `notes` are the sentences below the table.
    """
    measures = _shown(comparison)
    rows = []
    for index, row in enumerate(comparison.rows):
        spreads = {name: row.measures.get(name) for name in measures}
        numbers = {name: spread and {"mean": spread.mean, "std": spread.deviation} for name, spread in spreads.items()}
        directories = {"directories": [str(run.directory) for run in row.runs]}
        if found := comparison.contrasts.get(index):
            tested = {"test": found.test, "df": found.df, "uncorrected_p": found.p, "differs": found.differs}
            found = _numbers(found) | tested | {"compared_seeds": [len(found.values), len(found.others)]}
        directories |= {"front": row in comparison.front} if len(comparison.metrics) > 1 else {}
        about = {"values": row.values, "runs": len(row.runs), "seeds": row.seeds, "contrast": found}
        rows.append(about | numbers | directories)
    head = {"keys": comparison.keys, "metric": comparison.metric, "direction": comparison.direction}
    head |= {"metrics": comparison.metrics} if len(comparison.metrics) > 1 else {}
    head["reference"] = comparison.reference and comparison.reference.values
    content = head | {"rows": rows, "failures": [failure._asdict() for failure in comparison.failures]}
    content["notes"] = notes(comparison)
    text = json.dumps(content, default=str)  # in ASCII, with numbers such as NaN that JSON does not have
    return json.dumps(json.loads(text, parse_constant=lambda number: None), indent=2) + "\n"
