"""The summary of a sweep: its best combination; and, for TensorBoard, the columns of the HPARAMS tab and tables."""

from __future__ import annotations

import logging
import shlex
from collections import Counter
from dataclasses import replace
from pathlib import Path

from runner.analysis.comparison import Comparison, Row
from runner.analysis.tables import format_value, text_tables
from runner.config.errors import ConfigError
from runner.system.secrets import printable

log = logging.getLogger(__name__)

_MAX_ROWS, _MAX_LINES = 50, 10


def find_best(path: Path) -> str | None:
    """Return a line with the best combination of the sweep at `path`; None if no finished job has been evaluated.

    With several metrics, each combination on their front has a line. Jobs that differ only in their seed are one
    combination, which is ranked by their mean. One with fewer seeds that have a value than another does not count.
    """
    compared = _compared(path)
    rows = [row for row in compared.rows if compared.quality in row.measures] if compared and compared.metric else []
    if not compared or not rows:
        return None
    if len(compared.metrics) > 1:
        lines = [_described(compared, row, "front", [*compared.metrics]) for row in compared.front]
        return first_lines(lines or [f"no job has a value of each of {', '.join(map(printable, compared.metrics))}"])
    counts = [len(compared.by_seed(row)) for row in rows]
    return _described(compared, rows[counts.index(max(counts))], "best", [compared.quality])


def _described(compared: Comparison, row: Row, word: str, measures: list[str]) -> str:
    """Return `word`, these measures of a row, and its options or, of a single run, the name of its directory."""
    runs = [run for run in row.runs if {*measures} <= compared.measured(run).keys()]
    count, seeds = len(runs), replace(row, runs=runs).seeds
    mean = f"{count} seeds" if count == seeds else f"{count} runs ({seeds} seed{'s' * (seeds > 1)})"
    line = ", ".join(f"{tag} {row.measures[name]}" for tag, name in zip(compared.metrics, measures, strict=True))
    line += f", the mean of {mean}" if count > 1 else ""
    words = shlex.join(f"{key}={format_value(value)}" for key, value in row.values.items())
    name = words if len(row.runs) > 1 else row.runs[0].directory.name
    return printable(f"{word} {line}: {name}" if name else line)


def first_lines(lines: list[str]) -> str:
    """Return the first lines of a list, and how many there are more."""
    return "\n".join([*lines[:_MAX_LINES], *([f"… and {len(lines) - _MAX_LINES} more"] * (len(lines) > _MAX_LINES))])


def write_summary(path: Path) -> None:
    """Write the summary of a sweep as a TensorBoard event file in the sweep's directory, replacing any older summary.

    The summary consists of the columns of the HPARAMS tab, and of tables as text. If no key has several values or no
    job is done, nothing is written. If writing fails, a warning is logged.
    """
    try:
        _write(path)
    except Exception as error:  # the jobs are done, and their results are saved: nothing here may fail the sweep
        log.warning("the summary of the sweep cannot be written: %s", printable(f"{type(error).__name__}: {error}"))


def _write(path: Path) -> None:
    compared = _compared(path)
    if compared is None or not compared.rows:
        return
    from torch.utils.tensorboard.summary import hparams, text

    from runner.tracking.event_file import EventFile
    from runner.tracking.recorder import shown_values, typed_values
    from runner.tracking.tensorboard import hparam_values

    typed = [typed_values(run.overrides, run.config) for run in compared.runs]
    known = dict.fromkeys(key for values in typed for key in values)
    found = {key: {repr(values[key]): {key: values[key]} for values in typed if key in values} for key in known}
    swept = {key: list(values.values()) for key, values in found.items() if len(values) > 1}
    if not swept:
        return
    examples: dict[str, float | str] = {}
    texts: dict[str, list[str]] = {}
    for key, values in swept.items():
        cells = [cell for each in values for cell in hparam_values(shown_values(each)).values()]
        words = [cell for cell in cells if isinstance(cell, str)]
        if cells:
            examples[printable(key)] = (words or cells)[0]
        if words and len(words) == len(cells):  # TensorBoard hides the rows with a text that is not in the list
            texts[printable(key)] = words
    for old in path.glob(f"events.out.tfevents.{10 * '[0-9]'}"):  # TensorBoard would keep the columns of the first file
        if old.stat().st_size:
            old.write_bytes(b"")  # not removed: see `EventFile.remove_earlier`
        else:
            old.unlink()
    file = EventFile(path, first_step=0)
    try:
        tags = dict.fromkeys(tag for run in compared.runs if run.state == "done" for tag in run.result["metrics"])
        ordered = [printable(tag) for start in ("eval/", "train/") for tag in tags if tag.startswith(start)]
        metrics = [*filter(None, compared.metrics), *ordered, "time/samples_per_second"]
        file.add(hparams(examples, dict.fromkeys(metrics), texts)[0])
        file.add(text("sweep/summary", _tables(compared, path)))
    finally:
        file.close()


def _compared(path: Path) -> Comparison | None:
    try:
        return Comparison([path])
    except ConfigError:  # it contains no run
        return None


def _tables(compared: Comparison, path: Path) -> str:
    """Return Markdown: the number of jobs in each state, and the tables of `compare`."""
    jobs = compared.ledgers[path]["jobs"].values() if path in compared.ledgers else []
    states = Counter(str(entry.get("state", "unknown")) for entry in jobs)
    counts = f"{len(jobs)} jobs: {', '.join(f'{count} {state}' for state, count in states.most_common())}"
    tables = (table._replace(rows=table.rows[:_MAX_ROWS]).markdown() for table in text_tables(compared))
    return printable("\n\n".join([counts, *tables]))
