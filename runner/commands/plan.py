"""`python -m runner plan [OVERRIDE …]` predicts what resources a run will need, without training.

One training step of each process is executed with tensors that have no values. The plan shows which process computes
what, the peak memory of tensors by kind, the floating-point operations, the bytes that are sent, the bubble of a
pipeline, and the size of a checkpoint. A config that `python -m runner` would refuse is refused with the same message.

The plan can also be made for another machine: `--devices 8 --memory 80GB` says whether the run fits and, if not, with
which changes it would.

Exit codes: 0: planned. 1: the plan crashed. 2: the config is refused. 3: planned, but it does not fit into `--memory`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from runner.commands.arguments import Parser, check_not_resumed, command
from runner.config.errors import check
from runner.config.overrides import replaced
from runner.system.console import DONE

_UNITS = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?)\s*((?:[KMGT]I?)?)B?", re.IGNORECASE)
DOES_NOT_FIT = 3


@command
def main(arguments: Sequence[str] | None) -> int:
    parser = Parser("plan", __doc__, overrides=True)
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.add_argument("--devices", type=int, help="number of devices of the machine (default: those of this machine)")
    parser.add_argument("--memory", help="memory of each device, such as 80GB")
    options = parser.parsed(arguments)
    check_not_resumed(options.overrides)
    known = options.devices is None or 1 <= options.devices <= 4096
    check(known, "--devices", options.devices, "it is not from 1 to 4096", "--devices 8")
    memory = None
    if options.memory is not None:
        match = _SIZE.fullmatch(options.memory.strip())
        memory = float(match[1]) * _UNITS[match[2].upper()] if match else 0.0
        why = "it is not a number of bytes from a million, with or without a unit"
        check(1e6 <= memory < 1e30, "--memory", options.memory, why, "--memory 80GB or 80e9")
    report = plan(options.overrides, options.config_dir, options.devices, memory)
    from runner.analysis.output import print_report
    from runner.planning.report import render

    print_report(report, options.json, render)
    return DOES_NOT_FIT if report["fits"] is False else DONE


def plan(
    overrides: Sequence[str], config_dir: str | None = None, num_devices: int | None = None, memory: float | None = None
) -> dict[str, Any]:
    """Return the plan of a config as plain values; `memory` is that of a device, in bytes.

    It is the dict of `report_of`, with `memory_bytes`, `fits` and perhaps `remedies` if `memory` is given.
    """
    from runner.api.composing import compose
    from runner.planning.fake_step import prepared, trace_ranks
    from runner.planning.report import remedies, report_of
    from runner.run import Run, build_run, check_used

    def build(words: Sequence[str]) -> Run:
        return build_run(dict(compose(words, config_dir=config_dir)))

    run = build(overrides)
    check_used(run, overrides)
    session = prepared(run, num_devices)
    ranks = trace_ranks(run, session)
    report = report_of(run, session, ranks, num_devices)
    if memory is not None:
        report["memory_bytes"], report["fits"] = memory, max(rank.peak_bytes for rank in ranks) <= memory
    if report["fits"] is False:
        devices = num_devices or max(session.world_size, len(session.devices))
        report["remedies"] = remedies(run, lambda change: build(replaced(overrides, *change)), devices, memory or 0)
    return report
