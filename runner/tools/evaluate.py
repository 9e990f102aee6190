"""`python -m runner.tools.evaluate RUN [OVERRIDE …]` evaluates a checkpoint of a run on its held-out data.

The checkpoint is evaluated as the run did it, in the same parallel mode: the metrics equal the run's own to the last
bit. Overrides change the config of the run: `parallel=single device=cpu` evaluates on one device, `data.root=DIR` on
other images. Nothing is written to the run.

Exit codes: 0: evaluated. 1: the evaluation crashed. 2: there is no such run or checkpoint, or the config is refused.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from runner.cli.exit_codes import CRASHED, DONE, report_error
from runner.config.errors import ABSENT, check
from runner.parallel.launch.supervisor import RankError


def main(arguments: Sequence[str] | None = None) -> int:
    """Evaluate the checkpoint that the command line names, print its metrics, and return the exit code."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "python -m runner.tools.evaluate", description=__doc__, formatter_class=form, allow_abbrev=False
    )
    parser.add_argument("run", metavar="RUN", help="a run directory")
    parser.add_argument("--checkpoint", metavar="best|last|STEP", default="best", help="which one (default: best)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options, overrides = parser.parse_known_args(arguments)
    try:
        flags = [word for word in overrides if word.startswith("-")]
        check(not flags, "".join(flags[:1]), ABSENT, "there is no such flag of this tool;", "--help lists them")
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
