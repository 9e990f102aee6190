"""`python -m runner.tools.evaluate RUN [OVERRIDE …]` evaluates a checkpoint of a run on its held-out data.

The checkpoint is evaluated as the run did it, in the same parallel mode: the metrics equal the run's own to the last
bit. Overrides change the config of the run: `parallel=single device=cpu` evaluates on one device, `data.root=DIR` on
other images. Nothing is written to the run.

Exit codes: 0: evaluated. 1: the evaluation crashed. 2: there is no such run or checkpoint, or the config is refused.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from runner.cli.messages import report_error
from runner.parallel.launch.supervisor import RankError
from runner.system.exit_codes import CRASHED, DONE
from runner.tools.run_arguments import check_no_flags, run_parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Evaluate the checkpoint that the command line names, print its metrics, and return the exit code."""
    parser = run_parser("evaluate", __doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    options, overrides = parser.parse_known_args(arguments)
    try:
        check_no_flags(overrides)
        from runner.api.saved import load  # imported here: flags are checked before torch is imported

        run = load(options.run)
        checkpoint = run.checkpoint(options.checkpoint)
        metrics = run.evaluate(int(checkpoint.name.removeprefix("step_")), overrides)
    except Exception as error:
        if isinstance(error, RankError):
            print(f"{error.trace}{error}", file=sys.stderr)
            return CRASHED
        return report_error(error)
    print(_as_json(checkpoint, metrics) if options.json else _as_text(checkpoint, metrics))
    return DONE


def _as_json(checkpoint: Path, metrics: dict[str, float]) -> str:
    step = int(checkpoint.name.removeprefix("step_"))
    return json.dumps({"checkpoint": str(checkpoint), "step": step, "metrics": metrics}, indent=2)


def _as_text(checkpoint: Path, metrics: dict[str, float]) -> str:
    width = max(map(len, metrics))
    return "\n".join([str(checkpoint), *(f"{tag:<{width}}  {value:.6g}" for tag, value in metrics.items())])


if __name__ == "__main__":
    sys.exit(main())
