"""`python -m runner predict RUN FILE|DIRECTORY …` prints the class that a run predicts for each image.

Images are read as the evaluation of the run reads them: cropped, resized and normalized in the same way. For a file
that cannot be read, the reason is printed; if none can be read, the exit code is 2. Neither the data of the run nor
its device is needed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from runner.analysis.output import csv_text, one_line
from runner.commands.arguments import Parser, command
from runner.system.console import DONE, REFUSED
from runner.system.secrets import printable

if TYPE_CHECKING:
    from runner.api.prediction import Prediction


@command
def main(arguments: Sequence[str] | None) -> int:
    """Print the predictions for the images that the command line names."""
    parser = Parser("predict", __doc__)
    parser.add_run()
    parser.add_argument("files", metavar="FILE|DIRECTORY", nargs="+", help="images, or directories of images")
    forms = parser.add_mutually_exclusive_group()
    forms.add_argument("--csv", action="store_true", help="print CSV, not a table")
    forms.add_argument("--json", action="store_true", help="print JSON, not a table")
    options = parser.parsed(arguments)
    from runner.api.saved import load

    predictions = load(options.run).predict(options.files, options.checkpoint)
    rows = [[printable(each.file), each.label, each.probability, each.error] for each in predictions]
    names = ["file", "class", "probability", "error"]
    if options.csv:
        sys.stdout.write(csv_text([names, *rows]))
    elif options.json:
        print(json.dumps([dict(zip(names, row, strict=True)) for row in rows], indent=2))
    else:
        print(_as_table(predictions))
    return REFUSED if all(each.error for each in predictions) else DONE


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
