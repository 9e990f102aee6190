"""`python -m runner verify [--steps N] [OVERRIDE …]` compares a config with plain training on a single device.
`python -m runner verify RUN … [--steps N] [OVERRIDE …]` compares recorded runs with what today's code computes.
`python -m runner verify --against COMMIT [--steps N] [OVERRIDE …]` compares today's code with that of a commit.

The config and its reference (parallel=single, no accumulation, not compiled, not channels_last) train from the same
weights, three steps by default, in float64 and in the precision of the config. These are compared:

- the samples of each step, over all processes and micro-batches, bit for bit;
- the mean loss of each step, the gradients of the first step, weights and buffers after the last step, and the outputs
  of an evaluation. In float64 they must agree to 1e-9 (the mean loss, which is summed in float32, to 1e-6); in the
  precision of the config they must agree to 1e-2 (TF32 to 2.5e-2, 16 bits to 0.2).

The verdict is `cannot be judged` if rounding errors cannot be told apart from mistakes: those of the reference alone
exceed half of the limit and, times ten, explain the difference, something computes in float32 although float64 was
requested, or the device has no float64 and the results do not agree to 1e-6 (TF32 to 5e-3, 16 bits to 4e-2).

A RUN, or each run below it, is trained again from its first step, with its seed and its config, to the last point that
it has logged in 200 steps, or in N. The losses, metrics and gradient norms are compared with those that were logged. If
they are not identical, the steps are trained up to three times more, with the initial weights changed by 1e-6 (in TF32
and 16 bits by 5e-3) of their values: ten times the effect of this is what rounding explains. Overrides may change how
the run is computed: device, parallel, accumulation and their like.

With `--against`, 20 steps of the config, or N, are trained with the code of COMMIT and with today's, and compared in
the same way. COMMIT is one of the git repository of the current directory: of this project, or of your own code.

Exit codes: 0: the same. 1: different. 2: the config is refused, or cannot be the same (hogwild, ensemble). 3: cannot be
judged, which includes a config that crashes and a reference that diverges. Of several runs, the first of 1, 2, 3, 0.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from runner.analysis.output import one_line
from runner.analysis.saved_runs import find_runs
from runner.api.verification import MOST_STEPS, retrace, verify, verify_against
from runner.commands.arguments import Parser, check_not_resumed, report_error
from runner.commands.compare import existing
from runner.config.errors import check
from runner.system.console import REFUSED
from runner.verification.golden import changes
from runner.verification.verdict import HEADLINES, Outcome, Verdict

SAME, DIFFERENT, UNJUDGED = Verdict.SAME, Verdict.DIFFERENT, Verdict.UNJUDGED
_OF_RUN = {SAME: "the same", DIFFERENT: "different", UNJUDGED: "cannot be judged"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare the config of the command line with its reference, print the result, and return the exit code."""
    parser = Parser("verify", __doc__, overrides=True, paths=True)
    help = f"optimizer steps (default: 3; with --against 20; of a RUN, at most {MOST_STEPS})"
    parser.add_argument("--steps", type=int, help=help)
    parser.add_argument("--against", metavar="COMMIT", help="a commit of the repository of the current directory")
    try:
        options = parser.parsed(arguments)
        steps, overrides, paths = options.steps, options.overrides, existing(options.paths)
        check(steps is None or steps > 0, "--steps", steps, "there is nothing to compare", "--steps 3")
        check_not_resumed(overrides)
        runs = [run.directory for path in paths for run in find_runs([path])]
        check(bool(runs) or not paths, "PATH", " ".join(options.paths), "it contains no run", "name a run directory")
        why = "a recorded run is compared with today's code only"
        check(not (runs and options.against), "--against", options.against, why, "leave out the runs, or --against")
    except Exception as error:
        return report_error(error)
    if options.against:
        return _verdict(partial(verify_against, options.against, overrides, steps or 20, options.config_dir), _OF_RUN)
    if not paths:
        return _verdict(partial(verify, overrides, steps or 3, config_dir=options.config_dir), HEADLINES)
    codes = []
    for run in runs:
        print(one_line(f"{run}:"), flush=True)
        codes.append(_verdict(partial(retrace, run, overrides, steps, options.config_dir), _OF_RUN))
        if codes[-1] != REFUSED:
            _print_indented(changes(run) or ["no version, commit, device or core has changed"])
    return next((code for code in (DIFFERENT, REFUSED, UNJUDGED) if code in codes), SAME)


def _verdict(compared: Callable[[], Outcome], headlines: dict[Verdict, str]) -> int:
    """Print the result of a comparison, or the error that prevents it, and return the exit code."""
    try:
        outcome = compared()
    except Exception as error:
        if report_error(error) == REFUSED:
            return REFUSED
        print(f"{headlines[UNJUDGED]}: the config crashed", file=sys.stderr)
        return UNJUDGED
    for line in outcome.lines:
        print(line)
    headline, reason = headlines[outcome.verdict], outcome.reason
    on_one_line = outcome.verdict is UNJUDGED or headlines is _OF_RUN
    print((": " if on_one_line else "\n").join(filter(None, (headline, reason))))
    _print_indented(outcome.changes)
    return outcome.verdict


def _print_indented(lines: Iterable[str]) -> None:
    print("".join(f"  {one_line(line)}\n" for line in lines), end="", flush=True)
