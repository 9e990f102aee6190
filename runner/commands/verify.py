"""`python -m runner verify [--steps N] [OVERRIDE …]` compares a config with plain training on a single device.

The config and its reference (parallel=single, no accumulation, not compiled, not channels_last) train from the same
weights, three steps by default, in float64 and in the precision of the config. These are compared:

- the samples of each step, over all processes and micro-batches, bit for bit;
- the mean loss of each step, the gradients of the first step, weights and buffers after the last step, and the outputs
  of an evaluation. In float64 they must agree to 1e-9 (the mean loss, which is summed in float32, to 1e-6); in the
  precision of the config they must agree to 1e-2 (TF32 to 2.5e-2, 16 bits to 0.2).

The verdict is `cannot be judged` if rounding errors cannot be told apart from mistakes: those of the reference alone
exceed half of the limit and may explain the difference, something computes in float32 although float64 was requested,
or the device has no float64 and the results do not agree to 1e-6 (TF32 to 5e-3, 16 bits to 4e-2).

Exit codes: 0: the same. 1: different. 2: the config is refused, or cannot be the same (hogwild, ensemble). 3: cannot be
judged, which includes a config that crashes and a reference that diverges.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from runner.api.composing import compose
from runner.commands.arguments import Parser, check_not_resumed, report_error
from runner.config.errors import check
from runner.config.overrides import replaced
from runner.precision import Double
from runner.run import build_run, check_used
from runner.system.console import REFUSED
from runner.verification.steps import first_steps
from runner.verification.verdict import Outcome, Pair, Verdict, compare

SAME, DIFFERENT, UNJUDGED = Verdict.SAME, Verdict.DIFFERENT, Verdict.UNJUDGED
PLAIN = ("parallel=single", "accumulation=1", "compile=false", "channels_last=false")
"""The overrides that turn a config into its reference, which trains in the plainest way, on a single device."""

_HEADLINES = {
    SAME: "the same: this config computes what a single device computes, up to rounding",
    DIFFERENT: "different: this config does not compute what a single device computes",
    UNJUDGED: "cannot be judged",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare the config of the command line with its reference, print the result, and return the exit code."""
    parser = Parser("verify", __doc__, overrides=True)
    parser.add_argument("--steps", type=int, default=3, help="number of optimizer steps (default: 3)")
    try:
        options = parser.parsed(arguments)
        check(options.steps > 0, "--steps", options.steps, "there is nothing to compare", "--steps 3")
        check_not_resumed(options.overrides)
        outcome = verify(options.overrides, options.steps, options.config_dir)
    except Exception as error:
        if report_error(error) == REFUSED:
            return REFUSED
        print(f"{_HEADLINES[UNJUDGED]}: the config crashed", file=sys.stderr)
        return UNJUDGED
    for line in outcome.lines:
        print(line)
    headline, reason = _HEADLINES[outcome.verdict], outcome.reason
    print(f"{headline}: {reason}" if outcome.verdict is UNJUDGED else "\n".join(filter(None, (headline, reason))))
    return outcome.verdict


def verify(overrides: Sequence[str], steps: int = 3, config_dir: str | None = None) -> Outcome:
    """Compare a config with its reference, that is, the same config with the overrides `PLAIN`, for `steps` steps."""
    words = [*overrides, f"steps={steps}"]
    in_float64 = replaced(words, "precision=64")
    tested, reference = (
        [build_run(dict(compose(each, config_dir=config_dir))) for each in form]
        for form in ((words, in_float64), (replaced(words, *PLAIN), replaced(in_float64, *PLAIN)))
    )
    check_used(tested[0], overrides)
    precision = tested[0].precision
    if isinstance(precision, Double):
        del tested[0], reference[0]
    pairs = [Pair(*each) for each in zip(first_steps(tested), first_steps(reference), strict=True)]
    if isinstance(precision, Double):
        return compare(None, pairs[0], precision)
    return compare(pairs[0], pairs[1] if len(pairs) > 1 else None, precision)
