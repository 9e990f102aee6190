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
from typing import TYPE_CHECKING, Any

from runner.analysis.output import check_writable, csv_row, one_line, write_or_refuse
from runner.commands.arguments import Parser, command
from runner.config.errors import ConfigError
from runner.storage.files import write_text
from runner.system.console import DONE
from runner.system.secrets import printable

if TYPE_CHECKING:
    from runner.api.prediction import Prediction


@command
def main(arguments: Sequence[str] | None) -> int:
    """Print the predictions for the images that the command line names."""
    parser = Parser("predict", __doc__)
    parser.add_run()
    parser.add_argument("files", metavar="FILE|DIRECTORY", nargs="+", help="images, or directories of images")
    parser.add_argument("--csv", metavar="FILE", help="also write the table as CSV")
    parser.add_argument("--json", action="store_true", help="print JSON, not a table")
    options = parser.parsed(arguments)
    check_writable("--csv", options.csv)
    from runner.api.saved import load

    predictions = load(options.run).predict(options.files, options.checkpoint)
    rows = [
        {"file": printable(each.file), "class": each.label, "probability": each.probability, "error": each.error}
        for each in predictions
    ]
    inputs = {os.path.realpath(each.file) for each in predictions}
    if options.csv and os.path.realpath(os.path.expanduser(options.csv)) in inputs:
        raise ConfigError("--csv", options.csv, "it is one of the files to predict", "name another file")
    write_or_refuse("--csv", options.csv, lambda path: write_text(path, _as_csv(rows)))
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
