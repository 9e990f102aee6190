"""`python -m runner plot PATH…` draws the runs of a sweep, and writes their numbers as a CSV file.

It reads the runs below each PATH as `runner compare` does. Runs that differ only in their seed are repeats of one
measurement; error bars show the standard deviation over the repeats.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runner.analysis.comparison import MEASURES, Comparison
from runner.analysis.saved_runs import REPEATS
from runner.analysis.tables import csv_text
from runner.commands.arguments import Parser, command
from runner.commands.compare import existing, parser_of_runs
from runner.config.errors import ABSENT, ConfigError, check
from runner.config.overrides import as_typed
from runner.storage.files import check_no_link, write_text
from runner.storage.run_directory import StorageError
from runner.system.import_path import is_installed
from runner.system.secrets import printable


@command
def main(arguments: Sequence[str] | None) -> int:
    """Draw the figures of a sweep."""
    options = _parser().parsed(arguments)
    paths = existing(options.paths)
    common = paths[0] if len(paths) == 1 else Path(os.path.commonpath([path.absolute() for path in paths]))
    plot(paths, Path(os.path.expanduser(options.out)) if options.out else common / "plots", options.metric)
    return 0


def _parser() -> Parser:
    parser = parser_of_runs("plot", "Figures and numbers of a sweep.")
    parser.add_argument(
        "--out", metavar="DIR", help="output directory (default: `plots` in the common parent of all PATHs)"
    )
    return parser


def plot(paths: list[Path], out: Path, metric: str | None = None) -> None:
    """Write figures, and a CSV file with all runs, to `out`. Figures of an earlier call are removed first.

    Args:
        paths: directories that contain runs at any depth.
        out: the output directory.
        metric: as in `Comparison`.

    Raises:
        ConfigError: if there is nothing to plot, seaborn is not installed, `out` cannot be written to, or has files of
            these names that another program wrote.
    """
    check(
        is_installed("seaborn"), "seaborn", ABSENT, "it is not installed, and draws the figures", "pip install seaborn"
    )
    compared = Comparison(paths, metric)
    remedy = "see the log.txt of each run"
    check(bool(compared.rows), "PATH", " ".join(map(str, paths)), "none of its runs is done", remedy)
    try:
        written = _write(compared, out)
    except (OSError, StorageError) as error:
        why = error.why if isinstance(error, StorageError) else error.strerror
        raise ConfigError("--out", str(out), f"nothing can be written there ({why})", "--out=DIR") from None
    print("\n".join(printable(str(path)) for path in written))


def _write(compared: Comparison, out: Path) -> list[Path]:
    from runner.analysis.figures import NAMES, pictures

    check_no_link(out)
    out.mkdir(parents=True, exist_ok=True)
    table, old = out / "runs.csv", [out / f"{name}.png" for name in NAMES if os.path.lexists(out / f"{name}.png")]
    if table.exists() or old:
        is_ours = table.is_file() and table.read_text(errors="replace").partition("\n")[0].endswith("directory")
        why = f"{[*old, table][0].name} in it would be replaced, and this command did not write it"
        check(is_ours, "--out", str(out), why, "choose an empty directory")
    for path in old:
        path.unlink()  # if it is a link, the link itself
    write_text(table, csv_text(_runs(compared)))
    figures = {out / f"{name}.png": figure for name, figure in pictures(compared).items()}
    for path, figure in figures.items():
        figure.savefig(path)
    return [table, *figures]


def _runs(compared: Comparison) -> list[list[Any]]:
    """Return the lines of a table with all runs, done or not."""
    keys = [*compared.keys, *(key for key in REPEATS if any(key in run.labels for run in compared.runs))]
    lines: list[list[Any]] = [[*keys, "state", *map(compared.title, MEASURES), "directory"]]
    for run in compared.runs:
        values = [as_typed(run.labels[key]) if key in run.labels else "" for key in keys]
        numbers = compared.measured(run) if run.state == "done" else {}
        lines.append([*values, run.state, *(numbers.get(name, "") for name in MEASURES), str(run.directory)])
    return lines
