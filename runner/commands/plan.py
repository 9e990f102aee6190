"""`python -m runner plan [RUN] [OVERRIDE …]` predicts what resources a run will need, without training.

One training step of each process is executed with tensors that have no values. The plan shows which process computes
what, the peak memory of tensors by kind, the floating-point operations, the bytes that are sent, and the size of a
checkpoint. A config that `python -m runner` would refuse is refused with the same message.

The plan can also be made for another machine: `--devices 8 --memory 80GB` says whether the run fits and, if not, which
other ways to train it would fit; `--flops 300e12 --bandwidth 2e12 --link 200e9` adds a lower bound on the time of a
step.

With a run directory RUN, the config of the run is planned, and its measurements are shown beside the predictions.
Overrides change the config of the run; the measurements are then left out.

With `--measure`, the plan also predicts the time of a step. For a pipeline, it predicts this time for each schedule and
each `split_size`. The predictions are based on measurements, which take some seconds. The processes of the parallel
mode measure the parts of a step: making a batch, the forward and backward pass, the update and the messages. In a
pipeline, the forward and backward pass of each block are measured, too.

Exit codes: 0: planned. 1: the plan crashed. 2: the config is refused. 3: planned, but it does not fit into `--memory`.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from pathlib import Path

from runner.commands.arguments import Parser, check_not_resumed
from runner.commands.messages import report_error
from runner.config.errors import ABSENT, ConfigError, check

_UNITS = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?)\s*((?:[KMGT]I?)?)B?", re.IGNORECASE)
DOES_NOT_FIT = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the plan of the config that the arguments compose, and return the exit code."""
    try:
        options, overrides = parsed(arguments)
        from runner.commands.plan_report import plan

        machine = options.devices, options.memory, options.machine
        report = plan(overrides, options.config_dir, *machine, options.measure, options.run)
    except Exception as error:
        return report_error(error)
    from runner.analysis.output import print_report
    from runner.planning.report_tables import render

    print_report(report, options.json, render)
    return 0 if report["fits"] is not False else DOES_NOT_FIT


def parsed(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Return the flags and the overrides.

    Returns:
        A pair of the flags and the overrides. In the flags, sizes and speeds are numbers, and there are two more
        attributes:

        - `run`: the path RUN; None if it was not typed;
        - `machine`: a list of the values of `--flops`, `--bandwidth` and `--link`; None without these flags.

    Raises:
        ConfigError: for an unknown flag, a word that is not a valid override, a value that is out of range, or flags
            that do not go together.
    """
    parser = Parser("plan", __doc__, overrides=True)
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.add_argument("--measure", action="store_true", help="predict the time of a step from measured parts")
    parser.add_argument("--devices", help="number of devices of the machine (default: those of this machine)")
    parser.add_argument("--memory", help="memory of each device, such as 80GB")
    parser.add_argument("--flops", help="floating-point operations per second of each device, such as 300e12")
    parser.add_argument("--bandwidth", help="memory bandwidth of each device in bytes per second, such as 2e12")
    parser.add_argument("--link", help="bytes per second that a device sends to another one, such as 200e9")
    options = parser.parsed(arguments, _is_run)
    options.run, overrides = (Path(options.paths[0]) if options.paths else None), options.overrides
    check_not_resumed(overrides, "name the run directory itself: python -m runner plan RUN")
    if options.devices is not None:
        known = options.devices[:5].isdecimal() and 1 <= int(options.devices[:5]) <= 4096
        check(known, "--devices", options.devices, "it is not a number of devices", "--devices 8")
        options.devices = int(options.devices)
    for name in ("memory", "flops", "bandwidth", "link"):
        if (text := getattr(options, name)) is not None:
            setattr(options, name, _size(f"--{name}", text))
    enough = options.memory is None or options.memory >= 1e6
    check(enough, "--memory", options.memory, "these are bytes, and fewer than a million", "--memory 80GB")
    speeds = [getattr(options, name) for name in ("flops", "bandwidth", "link")]
    missing = [name for name in ("flops", "bandwidth") if getattr(options, name) is None]
    if missing and any(speeds):
        why = "a time follows only from --flops and --bandwidth together"
        raise ConfigError(f"--{missing[0]}", ABSENT, why, "--flops 300e12 --bandwidth 2e12 --link 200e9")
    if options.measure and (options.devices or any(speeds)):
        flag = "--devices" if options.devices else "--flops"
        raise ConfigError("--measure", ABSENT, f"it measures this machine, and {flag} is about another", f"drop {flag}")
    options.machine = None if missing else speeds
    return options, overrides


def _is_run(word: str) -> bool:
    """Return whether a word is the path of a directory, and not an override."""
    # The functions of `os.path` return False for words that are too long for a path.
    is_run = any(os.path.exists(os.path.join(word, name)) for name in ("config.yaml", "checkpoints"))
    return not word.startswith("-") and (is_run or ("=" not in word and os.path.isdir(word)))


def _size(flag: str, text: str) -> float:
    """Return the number in `text`, which may have a unit, for example 8e10 for `80GB` and for `80e9`.

    Raises:
        ConfigError: if `text` is not a positive number. The error names `flag`.
    """
    match = _SIZE.fullmatch(text.strip())
    value = float(match[1]) * _UNITS[match[2].upper()] if match else 0.0
    example = f"{flag} 80GB or 80e9" if flag == "--memory" else f"{flag} 300e12"
    check(0 < value < 1e30, flag, text, "it is not a positive number, with or without a unit", example)
    return value
