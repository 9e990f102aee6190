"""`python -m runner plot PATH…` summarizes the runs of a sweep as figures, tables and CSV files.

It reads `config.yaml` and `result.json` of every run directory below each PATH. Runs that differ only in their seed are
repeats of one measurement; error bars show the standard deviation over the repeats.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from runner.analysis.plot_runs import Study
from runner.analysis.plot_tables import render, write_points, write_runs
from runner.analysis.saved_runs import find_runs
from runner.commands.arguments import Parser
from runner.config.errors import ABSENT, ConfigError, check
from runner.config.overrides import typed_path
from runner.storage.regular_file import check_no_link, check_readable
from runner.storage.run_directory import StorageError
from runner.system.installed import is_installed
from runner.system.utf8 import printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, and return the exit code: 0, or 2 after printing an error message to standard error."""
    parser = Parser("plot", "Figures and tables of a sweep.")
    parser.add_argument("paths", metavar="PATH", nargs="+", help="a directory with runs at any depth below it")
    parser.add_argument(
        "--out", metavar="DIR", help="output directory (default: `plots` in the common parent of all PATHs)"
    )
    try:
        options = parser.parsed(arguments)
        paths = [Path(os.path.expanduser(path)) for path in options.paths]
        plot(paths, Path(os.path.expanduser(options.out)) if options.out else _common(paths) / "plots")
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _common(paths: list[Path]) -> Path:
    """Return the deepest directory that contains all of `paths`."""
    return paths[0] if len(paths) == 1 else Path(os.path.commonpath([path.absolute() for path in paths]))


def plot(paths: list[Path], out: Path) -> None:
    """Write figures, CSV files and TensorBoard events to `out`, and print a table.

    Args:
        paths: directories that contain runs at any depth.
        out: the output directory.

    Raises:
        ConfigError: if one of `paths` is not a directory, there is nothing to plot, matplotlib is not installed, or
            `out` cannot be written to; files that have been written remain.
    """
    remedy = "name the directory of a sweep, outputs/sweeps/NAME/…"
    for path in paths:
        check_readable("PATH", path)
        check(path.is_dir(), "PATH", str(path), "there is no such directory", remedy)
    installed = is_installed("matplotlib")
    why = "it is not installed, and draws the figures"
    check(installed, "matplotlib", ABSENT, why, "pip install matplotlib")
    study = Study(list(find_runs(paths)))
    names = " ".join(map(str, paths))
    check(bool(study.runs), "PATH", names, "it contains no run", "a run is a directory with a config.yaml")
    Console(width=None if sys.stdout.isatty() else 160).print(render(study))
    check(bool(study.points), "PATH", names, "none of its runs is done", "see the log.txt of each run")
    try:
        written = _write(study, out)
    except (OSError, StorageError) as error:
        why = error.why if isinstance(error, StorageError) else error.strerror
        raise ConfigError("--out", str(out), f"nothing can be written there ({why})", "--out=DIR") from None
    print("\n".join(printable(str(path)) for path in written))
    print(f"look: tensorboard --logdir {printable(typed_path(out.parent))}")


def _write(study: Study, out: Path) -> list[Path]:
    from runner.analysis.plot_pictures import pictures  # imported here, because it needs matplotlib

    check_no_link(out)
    out.mkdir(parents=True, exist_ok=True)
    written = [out / "runs.csv", out / "points.csv"]
    write_runs(study, written[0])
    write_points(study, written[1])
    figures = pictures(study)
    for name, figure in figures.items():
        written.append(out / f"{name}.png")
        written[-1].unlink(missing_ok=True)  # it may be a link, through which another file would be written
        figure.savefig(written[-1])
        figure.set_layout_engine("none")  # keeps the layout for TensorBoard: computing it again is slow
    if figures:
        _show(figures, out)
    return written


def _show(figures: dict[str, Figure], out: Path) -> None:
    """Write the figures to the directory `out` as TensorBoard images, which replace the images of an earlier call."""
    from runner.tracking.charts import image_summary  # imported here, because they need matplotlib and torch
    from runner.tracking.event_file import EventFile

    events = EventFile(out, first_step=0)
    for name, figure in figures.items():
        events.add(image_summary(f"study/{name}", figure))
    events.close()
