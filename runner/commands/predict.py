"""`python -m runner predict RUN FILE|DIRECTORY …` prints the class that a run predicts for each image.

Images are read as the evaluation of the run reads them: cropped, resized and normalized in the same way. For a file
that cannot be read, the reason is printed. Neither the data of the run nor its device is needed.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.analysis.output import check_writable, csv_row, one_line, write_or_refuse
from runner.commands.arguments import Parser, command
from runner.config.errors import ConfigError, check
from runner.storage.files import write_text
from runner.system.console import DONE
from runner.system.secrets import printable

if TYPE_CHECKING:
    from runner.api.prediction import Prediction
    from runner.api.saved import SavedRun

_MAX_IMAGES = 36
"""The maximum number of images in a grid."""


@command
def main(arguments: Sequence[str] | None) -> int:
    """Print the predictions for the images that the command line names."""
    parser = Parser("predict", __doc__)
    parser.add_run()
    parser.add_argument("files", metavar="FILE|DIRECTORY", nargs="+", help="images, or directories of images")
    parser.add_argument("--csv", metavar="FILE", help="also write the table as CSV")
    parser.add_argument("--json", action="store_true", help="print JSON, not a table")
    parser.add_argument("--grid", metavar="FILE.png", help=f"also draw the first {_MAX_IMAGES} images")
    options = parser.parsed(arguments)
    check_writable("--csv", options.csv)
    check_writable("--grid", options.grid, ".png")
    from runner.api.saved import load

    run = load(options.run)
    predictions = run.predict(options.files, options.checkpoint)
    rows = [
        {"file": printable(each.file), "class": each.label, "probability": each.probability, "error": each.error}
        for each in predictions
    ]
    inputs = {os.path.realpath(each.file) for each in predictions}
    for flag, path in (("--csv", options.csv), ("--grid", options.grid)):
        if path and os.path.realpath(os.path.expanduser(path)) in inputs:
            raise ConfigError(flag, path, "it is one of the files to predict", "name another file")
    write_or_refuse("--csv", options.csv, lambda path: write_text(path, _as_csv(rows)))
    write_or_refuse("--grid", options.grid, lambda path: _write_grid(path, run, options.checkpoint, predictions))
    print(json.dumps(rows, indent=2) if options.json else _as_table(predictions))
    return DONE


def _as_csv(rows: list[dict[str, Any]]) -> str:
    table = csv.writer(text := io.StringIO(), lineterminator="\n")
    table.writerow(rows[0])
    table.writerows(csv_row(row.values()) for row in rows)
    return text.getvalue()


def _as_table(predictions: list[Prediction]) -> str:
    from rich.cells import cell_len, set_cell_size

    # Names of classes may come from somebody else.
    labels = ["?" if each.error else one_line(each.label) for each in predictions]
    width = max(map(cell_len, labels))
    lines = []
    for label, each in zip(labels, predictions, strict=True):
        probability = " " * 6 if each.error else f"{each.probability:6.1%}"
        why = f": {printable(each.error)}" if each.error else ""
        lines.append(f"{set_cell_size(label, width)}  {probability}  {printable(each.file)}{why}")
    return "\n".join(lines)


def _write_grid(path: Path, run: SavedRun, checkpoint: str, predictions: list[Prediction]) -> None:
    """Write a PNG file with the first images that could be read, as in an evaluation, and their predicted classes."""
    import torch

    from runner.tracking.image_grids import grid, png

    shown = [each for each in predictions if not each.error][:_MAX_IMAGES]
    check(bool(shown), "--grid", str(path), "none of the images could be read", "leave it out")
    inputs = run.image_input(checkpoint)
    captions = [f"{each.label} {each.probability:.0%}" for each in shown]
    path.write_bytes(png(grid(torch.stack([inputs.read(each.file) for each in shown]), captions)))
