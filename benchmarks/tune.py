"""The choice of `runner tune`, compared with the best of an exhaustive search over the same candidates.

`python -m benchmarks.tune [CASE]…`: for each case, tune is run as a command. Then every combination of the options that
it may choose is measured, in bursts that alternate with bursts of the baseline, without a time limit. The result is how
much longer a step of the choice takes than a step of the best combination.
"""

import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.measure import runner, write
from runner.api.composing import compose
from runner.planning.candidates import ALLOWED, Candidate, Candidates, Overrides
from runner.planning.trial import BURST_SECONDS, Trial, TrialError
from runner.run import Run, build_run

GOAL = 0.03
CASES: dict[str, tuple[Sequence[str], float, str]] = {
    "digits": ((), 60, ""),
    "dqn": (("workload=dqn",), 60, ""),
    "resnet18, 32×32": (("model=resnet18", "data=synthetic", "data.size=32", "batch_size=32"), 60, ""),
    "resnet50, 128×128": (("workload=resnet50", "batch_size=16"), 120, ""),
    "resnet50, 128×128, 16 bits": (("workload=resnet50", "batch_size=16"), 120, "16bit"),
}
"""The overrides of each case, the budget of tune in seconds, and what is allowed."""

_PATIENCE, _ROUNDS = 900.0, 5


def tuned(overrides: Sequence[str], budget: float, allowed: str) -> dict[str, Any]:
    """Run tune as a command, and return its report."""
    with tempfile.TemporaryDirectory() as directory:
        words = [*overrides, f"output_root={directory}", "--json", "--budget", str(budget), "--allow", allowed]
        done = runner("tune", *words)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def combinations(overrides: Sequence[str], allowed: str) -> Iterator[Candidate]:
    """Yield every combination of the options that tune may choose, beginning with the baseline."""

    def build(more: Sequence[str]) -> Run:
        return build_run(dict(compose([*overrides, *more])))

    candidates, known = Candidates(build, overrides), []
    kinds = {*ALLOWED, *allowed.split(",")}
    options: list[list[Overrides]] = [[(), *group.options(candidates.base)] for group in candidates.groups()]
    for words in itertools.product(*options):
        judged = candidates.judged(tuple(itertools.chain.from_iterable(words)))
        if judged.run is not None and judged.results in kinds and judged.run.config not in known:
            known.append(judged.run.config)
            yield judged


def exhaustive(found: Iterator[Candidate]) -> dict[Overrides, float]:
    """Return the step time of each candidate, divided by that of the first candidate."""
    base = started(next(found))
    ratios: dict[Overrides, float] = {(): 1.0}
    for candidate in found:
        try:
            trial = started(candidate)
            values = []
            for _ in range(_ROUNDS):
                before = base.burst(_PATIENCE).step_seconds
                values.append(trial.burst(_PATIENCE).step_seconds / before)
            trial.close()
            ratios[candidate.overrides] = statistics.median(values)
        except TrialError as error:
            print(f"    {' '.join(candidate.overrides)}: {error}", file=sys.stderr)
    base.close()
    return ratios


def started(candidate: Candidate) -> Trial:
    """Start a trial, and let it train until its bursts have their full length."""
    assert candidate.run is not None
    trial, began = Trial(candidate.run.config, _PATIENCE), time.perf_counter()
    while time.perf_counter() - began < 2 * BURST_SECONDS:
        trial.burst(_PATIENCE)
    return trial


def main() -> None:
    """Tune and search the cases."""
    rows = []
    for name in sys.argv[1:] or CASES:
        overrides, budget, allowed = CASES[name]
        report = tuned(overrides, budget, allowed)
        ratios = exhaustive(combinations(overrides, allowed))
        chosen, best = tuple(report["chosen"]), min(ratios, key=lambda key: ratios[key])
        row = {"case": name, "overrides": overrides, "chosen": chosen, "best": best, "tune_seconds": report["seconds"]}
        row |= {"speedup": 1 / ratios[chosen], "best_speedup": 1 / ratios[best], "num_combinations": len(ratios)}
        rows.append(row | {"slower_than_best": ratios[chosen] / ratios[best] - 1})
        print(rows[-1])
        tables = [{"title": f"the choice within {GOAL:.0%} of the best", "rows": rows}]
        write("tune", tables, sys.argv[1:])  # a case may take long


if __name__ == "__main__":
    main()
