"""The choice of `runner tune`, compared with the best of an exhaustive search over the same candidates.

`python -m benchmarks.tune [CASE]…`: for each case, tune is run as a command. Then every combination of the options that
it may choose is measured, in bursts that alternate with bursts of the unchanged config, without a time limit. The
result is how much longer a step of the choice takes than a step of the best combination. With `--verify`,
`runner verify` checks the choice.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from benchmarks.measure import write
from runner.commands.composed_run import compose_run
from runner.planning.candidates import ALLOWED, PERMISSIONS, Candidate, Candidates, Overrides
from runner.planning.trial import Trial, TrialError
from runner.run import Run

GOAL = 0.03
CASES: dict[str, tuple[Sequence[str], float, str]] = {
    "digits": ((), 60, ""),
    "dqn": (("workload=dqn",), 60, ""),
    "resnet18, 32×32": (
        ("model=resnet18", "model.stem=cifar", "data=synthetic", "data.size=32", "batch_size=32"),
        60,
        "",
    ),
    "resnet50, 128×128": (("workload=resnet50", "batch_size=16"), 120, ""),
    "resnet50, 128×128, 16 bits": (("workload=resnet50", "batch_size=16"), 120, "16bit"),
}
"""The overrides of each case, the budget of tune in seconds, and what is allowed."""

_PATIENCE = 900.0
_BURST = 0.5
_ROUNDS = 5


def tuned(overrides: Sequence[str], budget: float, allowed: str) -> dict[str, Any]:
    """Run tune as a command, and return its report."""
    with tempfile.TemporaryDirectory() as directory:
        words = [*overrides, f"output_root={directory}", "--json", "--budget", str(budget), "--allow", allowed]
        done = subprocess.run([sys.executable, "-m", "runner", "tune", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def combinations(overrides: Sequence[str], allowed: str) -> Iterator[Candidate]:
    """Yield every combination of the options that tune may choose, beginning with the unchanged config."""

    def compose(more: Sequence[str]) -> Run:
        return compose_run([*overrides, *more], None, "tune")

    candidates = Candidates(compose, overrides)
    kinds = {*ALLOWED, *(PERMISSIONS[name] for name in allowed.split(",") if name)}
    for layout in candidates.layouts():
        if candidates.judged(layout).results not in kinds:
            continue
        changes: list[list[Overrides]] = []
        for change in candidates.groups():
            if not isinstance(change, partial):
                continue  # the layouts
            words = [candidate.overrides[len(layout) :] for candidate in change(layout) if candidate.results in kinds]
            changes.append([(), *words])
        for chosen in itertools.product(*changes):
            judged = candidates.judged((*layout, *itertools.chain.from_iterable(chosen)))
            if judged.results in kinds:
                yield judged


def exhaustive(found: Iterator[Candidate], report: bool = True) -> dict[Overrides, float]:
    """Return the step time of each candidate, divided by that of the first candidate."""
    first = next(found)
    assert first.run is not None
    default = Trial(first.run.config, _PATIENCE)
    length = _burst_length(default)
    ratios = {first.overrides: 1.0}
    try:
        for candidate in found:
            assert candidate.run is not None
            try:
                trial = Trial(candidate.run.config, _PATIENCE)
                own = _burst_length(trial)
                values = []
                for _ in range(_ROUNDS):
                    base = default.steps(length, _PATIENCE).step_seconds
                    values.append(trial.steps(own, _PATIENCE).step_seconds / base)
                trial.close()
            except TrialError as error:
                print(f"    {' '.join(candidate.overrides)}: {error}", file=sys.stderr)
                continue
            ratios[candidate.overrides] = statistics.median(values)
            if report:
                print(f"    {ratios[candidate.overrides]:.3f} {' '.join(candidate.overrides)}", file=sys.stderr)
    finally:
        default.close()
    return ratios


def _burst_length(trial: Trial) -> int:
    trial.steps(1, _PATIENCE)
    count = 1
    while (seconds := count * trial.steps(count, _PATIENCE).step_seconds) < _BURST / 4:
        count *= 4
    return max(1, round(count * _BURST / seconds))


def compared(name: str, verify: bool) -> dict[str, Any]:
    """Return the row of the case `name` in the table.

    The row contains the choice of tune, the best combination, and how much longer a step takes with the choice than
    with the best combination.
    """
    overrides, budget, allowed = CASES[name]
    began = time.perf_counter()
    report = tuned(overrides, budget, allowed)
    seconds = time.perf_counter() - began
    ratios = exhaustive(combinations(overrides, allowed))
    chosen = tuple(report["chosen"])
    best = min(ratios, key=lambda key: ratios[key])
    row = {
        "case": name,
        "overrides": list(overrides),
        "chosen": list(chosen),
        "best": list(best),
        "speedup": 1 / ratios[chosen],
        "best_speedup": 1 / ratios[best],
        "slower_than_best": ratios[chosen] / ratios[best] - 1,
        "tune_says": report["speedup"],
        "tune_seconds": seconds,
        "num_combinations": len(ratios),
    }
    if verify:
        words = [sys.executable, "-m", "runner", "verify", *overrides, *chosen]
        row["verify"] = subprocess.run(words, capture_output=True, check=False).returncode
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", default=list(CASES), metavar="CASE")
    parser.add_argument("--verify", action="store_true", help="prove each choice with runner verify")
    options = parser.parse_args()
    rows = []
    for name in options.cases:
        print(name, file=sys.stderr)
        rows.append(compared(name, options.verify))
        row = rows[-1]
        print(
            f"{name}: {' '.join(row['chosen']) or 'as it is'}: {row['speedup']:.2f} ×, "
            f"{row['slower_than_best']:+.1%} from the best of {row['num_combinations']} "
            f"({' '.join(row['best']) or 'as it is'}), {row['tune_seconds']:.0f} s"
        )
        tables = [{"title": f"the choice within {GOAL:.0%} of the best", "rows": rows}]
        # Written after each case, because a case may take half an hour.
        write("tune", tables, shlex.join(["python", "-m", "benchmarks.tune", *sys.argv[1:]]))


if __name__ == "__main__":
    main()
