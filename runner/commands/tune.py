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

Exit codes: 0: tuned, even if nothing is faster than the config itself. 1: the config crashed, or the result cannot
be saved. 2: the config is refused, or the budget is too small.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

from runner.commands.arguments import Parser, check_not_resumed, report_error
from runner.config.errors import ConfigError, check
from runner.system.exit_codes import CRASHED, DONE, REFUSED

_SAVING_SECONDS = 5.0
"""The part of the budget that is kept for ending the last trials, writing the files, and exiting."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Tune the config of the command line, print the result, and return the exit code."""
    began = time.perf_counter()
    try:
        options, overrides = parsed(arguments)
        from runner.planning.trial import TooLateError, TrialError

        try:
            report = tuned(overrides, options, began)
        except TooLateError as error:
            why = f"{error.why}: that is too little time to measure the config itself"
            raise ConfigError("--budget", options.budget, why, "type a larger one, or a smaller batch_size") from None
        except TrialError as error:
            print(f"{'' if error.refused else 'the config cannot be trained: '}{error.why}", file=sys.stderr)
            return REFUSED if error.refused else CRASHED
    except Exception as error:
        return report_error(error)
    from runner.analysis.output import print_report
    from runner.planning.tune import render

    print_report(report, options.json, render)
    return DONE if report["directory"] else CRASHED


def parsed(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Return the flags and the overrides; in the flags, `allow` is a list of keys of `candidates.RESULTS`.

    Raises:
        ConfigError: for an unknown flag, a word that is not a valid override, or a value that is out of range.
    """
    parser = Parser("tune", __doc__, overrides=True)
    parser.add_argument("--budget", type=float, default=60.0, help="seconds that the command may take (default: 60)")
    parser.add_argument("--allow", default="", help="rounding, 16bit, statistics, asynchronous; several with commas")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    options = parser.parsed(arguments)
    check_not_resumed(options.overrides)
    if not 1 <= options.budget <= 86_400:
        raise ConfigError("--budget", options.budget, "it is not from 1 to 86,400 seconds", "--budget 60")
    from runner.planning.candidates import PERMISSIONS

    options.allow = [name.strip() for name in options.allow.split(",") if name.strip()]
    for name in options.allow:
        check(name in PERMISSIONS, "--allow", name, "it is not a kind of results", ", ".join(PERMISSIONS))
    return options, options.overrides


def tuned(overrides: Sequence[str], options: argparse.Namespace, began: float) -> dict[str, Any]:
    """Find the fastest way to train a config, write the result to a new directory, and return it as plain values.

    The budget counts from `began`, a value of `time.perf_counter()`. `directory` is None, after a message on standard
    error, if the result cannot be saved.

    Raises:
        ConfigError: if the config is refused.
        TrialError: if the config cannot be trained, or its first steps take longer than the budget.
    """
    from runner.api.composing import compose
    from runner.planning.tune import tune, write
    from runner.run import build_run, check_used

    def said(line: str) -> None:
        if not options.json:
            print(line, file=sys.stderr, flush=True)

    def build(more: Sequence[str]) -> Any:
        return build_run(dict(compose([*overrides, *more], config_dir=options.config_dir)))

    run = build(())
    check_used(run, overrides)
    seconds = options.budget - _SAVING_SECONDS - (time.perf_counter() - began)
    flags = {"config_dir": options.config_dir, "budget": options.budget, "allowed": options.allow}
    found = tune(build, overrides, seconds, options.allow, said, options.config_dir)
    report = {"typed": list(overrides)} | flags | found
    try:
        return report | {"directory": str(write(report, run.output_root))}
    except (OSError, ConfigError) as error:  # what has taken a minute to measure is printed all the same
        print(f"the result cannot be saved: {error}", file=sys.stderr)
        return report | {"directory": None}
