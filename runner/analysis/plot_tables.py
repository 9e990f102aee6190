"""Functions that render a `Study`, a set of saved runs, as a table for a terminal and as CSV files."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from runner.analysis.output import csv_row, one_line
from runner.analysis.plot_runs import Point, Study
from runner.analysis.saved_runs import REPEATS
from runner.config.errors import escaped
from runner.config.overrides import as_typed
from runner.system.utf8 import printable
from runner.tracking.mean_std import Spread


def render(study: Study) -> Group:
    """Render a table of the points, with mean ± standard deviation over their repeats.

    Below the table, the runs that are excluded and the sweeps that are not complete are listed.
    """
    table = Table(box=SIMPLE_HEAD)
    for title in (*study.keys, "runs", *_cells(study, study.points[0])) if study.points else ():
        table.add_column(Text(one_line(title)), overflow="fold")  # Text, so that brackets are not markup
    for point in study.points:
        keys = [format_value(point.values.get(key, "")) for key in study.keys]
        table.add_row(*map(Text, (*keys, str(len(point.runs)), *_cells(study, point).values())))
    parts: list[RenderableType] = [table] if study.points else []
    if len(study.machines) > 1:
        parts.append(Text(f"measured on several machines: {'; '.join(study.machines)}", style="yellow"))
    if study.failed:
        parts.append(Text(f"{len(study.failed)} of {len(study.runs)} runs are excluded", style="bold red"))
        parts += [Text(f"  {_shown(run.directory)}: {one_line(run.failure)}") for run in study.failed]
    for path, ledger in study.unfinished.items():
        parts.append(Text(f"{_shown(path)} is not complete: repeat its command with resume=auto", "bold red"))
        refused = [job for job in ledger["jobs"].values() if job.get("code") and not _has_directory(path, job)]
        parts += [
            Text(f"  {one_line(' '.join(map(str, job.get('overrides', []))))}: {one_line(job.get('error', ''))}")
            for job in refused
        ]
    return Group(*parts)


def _has_directory(path: Path, job: dict[str, Any]) -> bool:
    """Return whether `job`, an entry in the ledger of the sweep at `path`, has a run directory in the sweep."""
    name = job.get("directory", "")
    return any(entry.name == name and entry.is_dir() for entry in path.iterdir())


def _shown(path: Path) -> str:
    """Return a path for the console, without control characters."""
    return escaped(printable(str(path)))


def _cells(study: Study, point: Point) -> dict[str, str]:
    """Return the measurements of `point` by column title."""
    cells = {"seconds per step": plus_minus(point.seconds), "samples/s": plus_minus(point.samples_per_second)}
    if "parallel" in study.keys:
        single = study.single(point)
        cells["× single"] = f"{single.seconds.mean / point.seconds.mean:.2f}" if single else ""
    if study.metric:
        cells[study.metric] = plus_minus(point.final) if point.final else ""
    return cells


def plus_minus(spread: Spread) -> str:
    """Return `mean ± deviation` as text, both with the same number of decimals.

    The number of decimals is the largest for which the deviation has at most two significant digits, and the mean at
    most five. All digits before the decimal point are kept, even if there are more than two or five of them. If there
    is only one value, and therefore no deviation, return the value with at most four significant digits.
    """
    if math.isnan(spread.deviation):
        return f"{spread.mean:.4g}"
    largest = max(spread.deviation, abs(spread.mean) / 1000)
    digits = max(0, 1 - math.floor(math.log10(largest))) if largest else 1
    return f"{spread.mean:.{digits}f} ± {spread.deviation:.{digits}f}"


def format_value(value: object) -> str:
    """Return a config value as the user types it."""
    return escaped(printable(as_typed(value)))


def write_runs(study: Study, path: Path) -> None:
    """Write a CSV file with one row per run, including failed runs.

    Raises:
        OSError: if the file cannot be written.
    """
    repeats = [key for key in REPEATS if any(key in run.labels for run in study.runs)]
    titles = [*study.keys, *repeats, "status", "seconds_per_step", "p90_seconds_per_step", "samples_per_second"]
    rows: list[list[Any]] = [[*titles, study.metric or "metric", "peak_memory_bytes", "world_size", "directory"]]
    for run in study.runs:
        times, counted = run.result.get("step_seconds", {}), not run.failure
        rows.append(
            [
                *(run.labels.get(key, "") for key in (*study.keys, *repeats)),
                "done" if counted else one_line(run.failure),
                times.get("median", ""),
                times.get("p90", ""),
                run.samples_per_second if counted else "",
                run.result.get("metrics", {}).get(study.metric, ""),
                *(run.result.get(key, "") for key in ("peak_memory_bytes", "world_size")),
                printable(str(run.directory)),
            ]
        )
    _write(path, rows)


def write_points(study: Study, path: Path) -> None:
    """Write a CSV file with one row per point: means, and sample standard deviations (empty for a single run).

    Raises:
        OSError: if the file cannot be written.
    """
    measures = ["seconds_per_step", "samples_per_second", study.metric or "metric"]
    rows: list[list[Any]] = [[*study.keys, "runs", *(f"{name}{end}" for name in measures for end in ("", "_std"))]]
    for point in study.points:
        spreads = (point.seconds, point.samples_per_second, point.final)
        numbers = ["" if x is None or math.isnan(x) else x for spread in spreads for x in spread or (None, None)]
        rows.append([*(point.values.get(key, "") for key in study.keys), len(point.runs), *numbers])
    _write(path, rows)


def _write(path: Path, rows: list[list[Any]]) -> None:
    path.unlink(missing_ok=True)  # it may be a link, through which another file would be written
    with path.open("x", encoding="utf-8", errors="backslashreplace", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(map(csv_row, rows))
