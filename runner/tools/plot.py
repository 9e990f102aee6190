"""`python -m runner.tools.plot PATH…`: what the runs of a sweep show, as pictures, tables and CSV.

It reads the `config.yaml` and `result.json` of every run directory below each PATH. Runs that differ by their seed
alone repeat a measurement; error bars are the standard deviation over them.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from runner.config.errors import ABSENT, ConfigError, check
from runner.tools.plot_runs import Study, find_runs
from runner.tools.plot_tables import render, write_points, write_runs

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def main(arguments: Sequence[str] | None = None) -> int:
    """Plot what the command line names; returns the exit code: 0, or 2 with the reason on standard error."""
    parser = argparse.ArgumentParser("python -m runner.tools.plot", description="Pictures and tables of a sweep.")
    parser.add_argument("paths", metavar="PATH", nargs="+", help="a sweep directory: runs at any depth below it")
    parser.add_argument(
        "--out", metavar="DIR", help="where to write; else `plots` in the directory that holds all PATHs"
    )
    options = parser.parse_args(arguments)
    try:
        paths = [Path(path).expanduser() for path in options.paths]
        plot(paths, Path(options.out).expanduser() if options.out else _common(paths) / "plots")
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _common(paths: list[Path]) -> Path:
    """The nearest directory that holds all of `paths`."""
    return paths[0] if len(paths) == 1 else Path(os.path.commonpath([path.absolute() for path in paths]))


def plot(paths: list[Path], out: Path) -> None:
    """Write pictures, CSV and TensorBoard's events of the runs below `paths` to `out`, and the table to the console.

    Raises:
        ConfigError: when there is nothing to plot, no matplotlib to plot it with, or no way to write it.
    """
    for path in paths:
        check(path.is_dir(), "PATH", str(path), "there is no such directory", "name a sweep's: outputs/sweeps/NAME/…")
    there = importlib.util.find_spec("matplotlib") is not None
    check(there, "matplotlib", ABSENT, "it is not installed, and draws the pictures", "pip install 'matplotlib>=3.9'")
    study = Study(list(find_runs(paths)))
    where = " ".join(map(str, paths))
    check(bool(study.runs), "PATH", where, "it holds no run", "a run is a directory with a config.yaml")
    Console(width=None if sys.stdout.isatty() else 160).print(render(study))
    check(bool(study.points), "PATH", where, "none of its runs came to its end", "see each run's log.txt")
    try:
        written = _write(study, out)
    except OSError as error:
        raise ConfigError("--out", str(out), f"nothing can be written there ({error.strerror})", "--out=DIR") from None
    print("\n".join(str(path) for path in written))
    print(f"look: tensorboard --logdir {shlex.quote(str(out.parent))}")


def _write(study: Study, out: Path) -> list[Path]:
    from runner.tools.plot_pictures import pictures  # here, not above: it needs matplotlib

    out.mkdir(parents=True, exist_ok=True)
    written = [out / "runs.csv", out / "points.csv"]
    write_runs(study, written[0])
    write_points(study, written[1])
    figures = pictures(study)
    for name, figure in figures.items():
        figure.savefig(out / f"{name}.png")
        written.append(out / f"{name}.png")
    if figures:
        _show(figures, out)
    return written


def _show(figures: dict[str, Figure], out: Path) -> None:
    """Put the pictures into TensorBoard; those of an earlier call are replaced."""
    import torch  # here, not above: mistakes are told without waiting for it
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from torch.utils.tensorboard.summary import image

    from runner.tracking.event_file import EventFile

    events = EventFile(out, first_step=0)
    for name, figure in figures.items():
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        pixels = torch.frombuffer(bytearray(canvas.buffer_rgba()), dtype=torch.uint8)
        width, height = canvas.get_width_height()
        events.add(image(f"study/{name}", pixels.view(height, width, 4)[:, :, :3].permute(2, 0, 1), dataformats="CHW"))
    events.close()


if __name__ == "__main__":
    sys.exit(main())
