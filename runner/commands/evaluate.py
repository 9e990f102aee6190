"""`python -m runner evaluate RUN [OVERRIDE …]` evaluates a checkpoint of a run on its held-out data.

The checkpoint is evaluated as in the run, in the same parallel mode, so that the metrics equal the run's own to the
last bit. Overrides change the config of the run: `parallel=single device=cpu` evaluates the checkpoint on the CPU.
`data.root=DIR` evaluates it on all images in DIR (or on those in DIR/val, if DIR has a directory for each split), and
`data.file=FILE` on all rows of a table. Normalization and columns are those of the checkpoint. The episodes of an agent
are the same for every `seed`; `workload.eval_episodes=500` plays more. Nothing is written to the run directory. For up
to 1,000 classes, the precision, the recall and F1 of each class are printed, and the classes that are most often
confused; `--json` and `--csv` have the whole confusion matrix.

Exit codes: 0: evaluated. 1: the evaluation crashed. 2: there is no such run or checkpoint, or the config is refused.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from runner.analysis.output import csv_text, one_line
from runner.commands.arguments import Parser, command
from runner.system.console import DONE
from runner.system.tables import table
from runner.tracking.log_file import LogFile

if TYPE_CHECKING:
    from rich.console import RenderableType

    from runner.api.evaluation import Evaluation

_MOST = 30  # classes that are shown in a terminal


@command
def main(arguments: Sequence[str] | None) -> int:
    parser = Parser("evaluate", __doc__, overrides=True, config_dir=False)
    parser.add_run()
    splits = "val: the held-out samples; test: those in test/ (default: val, and all of other data)"
    parser.add_argument("--split", metavar="train|val|test|all", help=splits)
    parser.add_forms(csv="print CSV: a row for each class, or, without classes, metric", json="print JSON")
    options = parser.parsed(arguments)
    from runner.api.evaluation import evaluate_checkpoint
    from runner.api.saved import load

    checkpoint = load(options.run).checkpoint(options.checkpoint)
    with LogFile(None):  # on the console: which files are ignored, for example
        evaluation = evaluate_checkpoint(checkpoint, options.overrides, options.split)
    if options.json or options.csv:  # which have no NaN
        metrics = {tag: value if math.isfinite(value) else None for tag, value in evaluation.metrics.items()}
        evaluation = evaluation._replace(metrics=metrics)
    if options.json:
        step = int(checkpoint.name.removeprefix("step_"))
        report = {"checkpoint": str(checkpoint), "step": step, "metrics": evaluation.metrics}
        print(json.dumps(report | {"description": evaluation.description, **evaluation.details}, indent=2))
        return DONE
    if options.csv:
        sys.stdout.write(csv_text(_lines(evaluation)))
        return DONE
    metrics = {tag: f"{value:.6g}" for tag, value in evaluation.metrics.items()}
    cells = evaluation.description | {"checkpoint": str(checkpoint)} | metrics
    width = max(map(len, cells))
    print("\n".join(f"{name:<{width}}  {cell}" for name, cell in cells.items()))
    if evaluation.details:
        from rich.console import Console

        Console(width=None if sys.stdout.isatty() else 140).print(*_tables(evaluation.details), crop=False)
    return DONE


def _lines(evaluation: Evaluation) -> Iterator[list[Any]]:
    """Yield the lines of the CSV table: with each class, how often its samples were taken for each class."""
    if not evaluation.details:
        yield from (["metric", "value"], *map(list, evaluation.metrics.items()))
        return
    classes = evaluation.details["classes"]
    yield [*classes[0], *(f"predicted {each['class']}" for each in classes)]
    for each, counts in zip(classes, evaluation.details["confusion"], strict=True):
        yield [*each.values(), *counts]


def _tables(details: dict[str, Any]) -> Iterator[RenderableType]:
    """Yield the classes with the lowest F1, and the pairs of classes that are confused most often."""
    classes, confusion = details["classes"], details["confusion"]
    names = [one_line(each["class"]) for each in classes]
    worst = sorted(range(len(classes)), key=lambda i: classes[i]["f1"] or 0)[:_MOST]
    numbers = [[f"{x:.4f}" if isinstance(x, float) else x for x in each.values()] for each in classes]
    rows = [[names[i], *numbers[i][1:]] for i in sorted(worst)]
    left_out = len(classes) - len(worst)
    title = f"the {_MOST} classes with the lowest F1; --csv has all {len(classes)}" if left_out else "classes"
    yield table(title, [*classes[0]], rows, right_from=1)
    pairs = [(count, i, j) for i, row in enumerate(confusion) for j, count in enumerate(row) if count and i != j]
    taken = [[names[i], names[j], count] for count, i, j in sorted(pairs, key=lambda pair: -pair[0])[:10]]
    if taken:
        yield table("most often confused", ["class", "predicted", "samples"], taken, right_from=2)
