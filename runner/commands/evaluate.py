"""`python -m runner evaluate RUN [OVERRIDE …]` evaluates a checkpoint of a run on its held-out data.

The checkpoint is evaluated as in the run, in the same parallel mode, so that the metrics equal the run's own to the
last bit. Overrides change the config of the run: `parallel=single device=cpu` evaluates the checkpoint on the CPU.
`data.root=DIR` evaluates it on all images in DIR (or on those in DIR/val, if DIR has a directory for each split), and
`data.file=FILE` on all rows of a table. Normalization and columns are those of the checkpoint. Nothing is written to
the run directory.

Exit codes: 0: evaluated. 1: the evaluation crashed. 2: there is no such run or checkpoint, or the config is refused.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from runner.commands.arguments import Parser, command
from runner.system.console import DONE
from runner.tracking.log_file import LogFile


@command
def main(arguments: Sequence[str] | None) -> int:
    """Evaluate the checkpoint that the command line names, and print its metrics."""
    parser = Parser("evaluate", __doc__, overrides=True, config_dir=False)
    parser.add_run()
    splits = "val: the held-out samples; test: those in test/ (default: val, and all of other data)"
    parser.add_argument("--split", metavar="train|val|test|all", help=splits)
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parsed(arguments)
    from runner.api.evaluation import evaluate_checkpoint
    from runner.api.saved import load

    checkpoint = load(options.run).checkpoint(options.checkpoint)
    with LogFile(None):  # on the console: which files are ignored, for example
        evaluation = evaluate_checkpoint(checkpoint, options.overrides, options.split)
    if options.json:
        step = int(checkpoint.name.removeprefix("step_"))
        print(json.dumps({"checkpoint": str(checkpoint), "step": step, **evaluation._asdict()}, indent=2))
        return DONE
    metrics = {tag: f"{value:.6g}" for tag, value in evaluation.metrics.items()}
    cells = evaluation.description | {"checkpoint": str(checkpoint)} | metrics
    width = max(map(len, cells))
    print("\n".join(f"{name:<{width}}  {cell}" for name, cell in cells.items()))
    return DONE
