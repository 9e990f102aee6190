"""`python -m runner tune [OVERRIDE …]` finds the fastest way to train a config on this machine.

Each candidate is the config with some of these settings changed: parallel mode, number of processes, schedule and split
size of a pipeline, number of threads, memory format, accumulation, data workers and, last, compilation. Settings that
are given as overrides are not changed: with `parallel=ddp`, no other modes are tried. Each candidate trains
real steps in turn with the config itself, and is dropped as soon as it is clearly slower than the fastest one.

By default, the results of a candidate differ from those of the config only by rounding errors, because sums may be
computed in another order. `--allow` permits further changes of the results:

- rounding: multiplications with fewer bits (TF32);
- 16bit: 16-bit arithmetic;
- statistics: batch normalization computes its statistics over different groups of samples;
- asynchronous: Hogwild's workers do not wait for each other.

The choice is printed as overrides, and written as an experiment to a directory in `outputs/tuned/`, together with all
measurements.

The config itself is always measured; what the budget does not suffice for is listed.

Exit codes: 0: tuned, even if nothing is faster than the config itself. 1: the config crashed or did not get to its
first step in ten minutes, or the result cannot be saved. 2: the config is refused.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from runner.commands.arguments import Parser, check_not_resumed, command
from runner.config.errors import ConfigError, check
from runner.system.console import CRASHED, DONE, REFUSED

if TYPE_CHECKING:
    from runner.run import Run

_SAVING_SECONDS = 5.0
"""The part of the budget that is kept for ending the last trials, writing the files, and exiting."""


@command
def main(arguments: Sequence[str] | None) -> int:
    began = time.perf_counter()
    parser = Parser("tune", __doc__, overrides=True)
    parser.add_argument("--budget", type=float, default=60.0, help="seconds to take (default: 60)")
    parser.add_argument("--allow", default="", help="rounding, 16bit, statistics, asynchronous; several with commas")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    options = parser.parsed(arguments)
    overrides, config_dir = options.overrides, options.config_dir
    check_not_resumed(overrides)
    from runner.analysis.output import print_report
    from runner.api.composing import compose
    from runner.planning.candidates import PERMISSIONS
    from runner.planning.trial import TrialError
    from runner.planning.tune import MAX_BUDGET, render, tune, write_report
    from runner.run import build_run, check_used

    why = f"it is not from 1 to {MAX_BUDGET:,} seconds"
    check(1 <= options.budget <= MAX_BUDGET, "--budget", options.budget, why, "--budget 60")
    allowed = [name.strip() for name in options.allow.split(",") if name.strip()]
    for name in allowed:
        check(name in PERMISSIONS, "--allow", name, "it is not a kind of results", ", ".join(PERMISSIONS))

    def build(more: Sequence[str]) -> Run:
        return build_run(dict(compose([*overrides, *more], config_dir=config_dir)))

    run = build(())
    check_used(run, overrides)
    seconds = options.budget - _SAVING_SECONDS - (time.perf_counter() - began)
    try:
        found = tune(build, overrides, seconds, allowed, partial(print, file=sys.stderr, flush=True))
    except TrialError as error:
        print(f"the config cannot be trained: {error.why}", file=sys.stderr)
        return REFUSED if error.status == "refused" else CRASHED
    flags = {"config_dir": config_dir, "budget": options.budget, "allowed": allowed}
    report, directory = {"typed": list(overrides)} | flags | found, None
    try:
        directory = str(write_report(report, run.output_root))
    except (OSError, ConfigError) as error:  # what has taken a minute to measure is printed all the same
        print(f"the result cannot be saved: {error}", file=sys.stderr)
    print_report(report | {"directory": directory}, options.json, render)
    return DONE if directory else CRASHED
