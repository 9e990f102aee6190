"""`runner tune`: the search for the fastest way to train a run, its tables, and the experiment that it writes.

A candidate and the baseline train in processes of their own, for a fraction of a second one after the other, while the
other one waits. A change of the machine's speed therefore affects both; only the ratio of their times is used. A
candidate that is slower than the fastest one is dropped as soon as this is clear.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from runner.config.experiment_file import experiment_command, experiment_file
from runner.config.options import groups_in_defaults
from runner.config.overrides import override_key
from runner.planning.candidates import ALLOWED, RESULTS, Candidate, Candidates, Compose, OptionGroup, Overrides
from runner.planning.trial import BURST_SECONDS, Trial, TrialError
from runner.storage import run_directory
from runner.storage.files import write_text
from runner.system.cpu import cpu_model
from runner.system.tables import milliseconds, significant, size, table

EXPERIMENT = "tuned"
"""The name of the experiment with the chosen overrides."""

_MUCH_SLOWER = 1.6
"""A candidate whose steps take this many times as long as the fastest one's is dropped after a single round."""

MAX_ROUNDS = 9
"""Rounds for which a candidate is compared with the baseline, if it is not clearly slower than the fastest one."""

_PATIENT_STARTS = 4
"""A candidate may take this many times as long to start as the baseline, whatever is left of its group's time."""

MAX_START = 600.0
"""The baseline may take these seconds to start, whatever the budget is: all others are compared with it."""

MAX_BUDGET = 86_400

BUDGET_SPENT = "the budget is spent: a larger --budget measures more"


class Search:
    """The search for the fastest candidate.

    Args:
        judge: returns the candidate with the given overrides, as `Candidates.judged` does.
        start: starts a trial of a candidate, which may take the given number of seconds, or raises TrialError.
        budget: seconds that the search may take.
        allowed: the kinds of effect in `RESULTS` that a candidate may have, in addition to those in `ALLOWED`.
        report: called with a line about each candidate that has been tried.
    """

    def __init__(
        self,
        judge: Callable[[Overrides], Candidate],
        start: Callable[[Candidate, float], Trial],
        budget: float = 60.0,
        allowed: Iterable[str] = (),
        clock: Callable[[], float] = time.perf_counter,
        report: Callable[[str], None] = lambda line: None,
    ):
        self._judge, self._start, self._allowed = judge, start, {*ALLOWED, *allowed}
        self._clock, self._report, self._ends = clock, report, clock() + budget
        self.base = judge(())
        """The baseline."""
        self.candidates = [self.base]

    def run(self, groups: Sequence[OptionGroup]) -> Candidate:
        """Measure candidates, and return the fastest, or the baseline if none is clearly faster.

        The options of each group are combined with the fastest overrides of the groups before.

        Raises:
            TrialError: if the baseline, with which all others are compared, cannot train or fails later.
        """
        with closing(self._started(self.base, max(MAX_START, self._ends - self._clock()))) as trial:
            self._burst(self.base, trial)
            for number, group in enumerate(groups):
                best, now = self._fastest(), self._clock()
                assert best.run is not None
                share = group.weight / sum(each.weight for each in groups[number:])
                until = now + (self._ends - now) * share
                for words in group.options(best.run):
                    self._try((*best.overrides, *words), until, trial)
            return self._fastest()

    def measured(self) -> list[Candidate]:
        """Return the measured candidates, the fastest first."""
        return sorted((each for each in self.candidates if each.seconds), key=lambda each: each.ratio)

    def _fastest(self) -> Candidate:
        """Return the baseline if none is clearly faster; of candidates that tie for the fastest, the first to start."""
        best, *others = self.measured()
        equal = [best, *(each for each in others if not best.is_faster_than(each))]
        return self.base if self.base in equal else min(equal, key=lambda each: each.startup_seconds)

    def _try(self, overrides: Overrides, until: float, base_trial: Trial) -> None:
        """Measure the candidate with `overrides` if it is new, allowed and possible, and `until` is not over."""
        candidate, now = self._judge(overrides), self._clock()
        if candidate.run is not None:
            if candidate.run.config in (each.run.config for each in self.candidates if each.run is not None):
                return
            start = max(1.0, self.base.startup_seconds)  # a candidate may have several processes
            seconds = min(self._ends - now, max(until - now, _PATIENT_STARTS * start))
            if candidate.results not in self._allowed:
                candidate.reason = RESULTS[candidate.results]
            elif now >= until or seconds <= start:
                candidate.reason = BUDGET_SPENT
            else:
                self._compare(candidate, seconds, until, base_trial)
        self.candidates.append(candidate)
        status = f"{candidate.status}: {candidate.reason}"
        found = f"{milliseconds(candidate.step_seconds)} a step" if candidate.seconds else status
        self._report(f"{' '.join(overrides)}: {found}")

    def _compare(self, candidate: Candidate, seconds: float, until: float, base_trial: Trial) -> None:
        """Let a candidate, which may take `seconds` to start, and the baseline train in turn."""
        best, turn = self._fastest(), candidate
        try:
            with closing(self._started(candidate, seconds)) as trial:
                while not candidate.ratios or self._goes_on(candidate, best, until):
                    pair = [(self.base, base_trial), (candidate, trial)]
                    for turn, each in pair if len(candidate.ratios) % 2 else reversed(pair):
                        self._burst(turn, each)
                    candidate.ratios.append(candidate.seconds[-1] / self.base.seconds[-1])
        except TrialError as error:
            if turn is self.base:
                raise
            candidate.status, candidate.reason, candidate.seconds, candidate.ratios = error.status, error.why, [], []

    def _goes_on(self, candidate: Candidate, best: Candidate, until: float) -> bool:
        """Return whether there is a reason, and the time, to compare a candidate for another round."""
        count, now = len(candidate.ratios), self._clock()
        if count == MAX_ROUNDS or candidate.ratio > _MUCH_SLOWER * best.ratio or best.is_faster_than(candidate):
            return False
        ends = now + sum(max(BURST_SECONDS, each.step_seconds) for each in (self.base, candidate))
        return ends < self._ends and (count < 3 or ends < until)

    def _started(self, candidate: Candidate, seconds: float) -> Trial:
        """Start a trial and let it warm up, which may take `seconds` in all."""
        until, taken = self._clock() + seconds, 0.0
        trial = self._start(candidate, seconds)
        candidate.startup_seconds = trial.startup_seconds
        try:
            while taken < BURST_SECONDS / 2:
                began = self._clock()
                trial.burst(until - began)
                taken = self._clock() - began
        except TrialError as error:
            trial.close()
            if error.status == "dropped":
                error.why = f"its first steps take longer than {seconds:.0f} s"
            raise
        return trial

    def _burst(self, candidate: Candidate, trial: Trial) -> None:
        burst = trial.burst(60 + 10 * candidate.startup_seconds)  # after that, it is taken to hang
        candidate.status, candidate.memory_bytes = "measured", burst.memory_bytes
        candidate.seconds.append(burst.step_seconds)


# ---------------------------------------------------------------------------------------------------------------------
# The report


def tune(
    compose: Compose,
    typed: Sequence[str],
    budget: float,
    allowed: Iterable[str] = (),
    report: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Measure the candidates of a run, and return the result as plain values.

    `compose` and `typed` are as in `Candidates`, `budget`, `allowed` and `report` as in `Search`.

    Returns:
        A dict: `chosen`, the chosen overrides; `speedup`, the step time of the baseline divided by that of the choice;
        `seconds`, how long the call took; and `rows`, a dict for each candidate (see `plain`), the fastest first.

    Raises:
        ConfigError: if the run is refused.
        TrialError: if the run cannot train, or its first steps take longer than the budget and `MAX_START`.
    """
    began = time.perf_counter()
    candidates = Candidates(compose, typed)
    left = budget - (time.perf_counter() - began)
    search = Search(candidates.judged, start, left, allowed, report=report)
    chosen = search.run(candidates.groups())
    rows = [*search.measured(), *(each for each in search.candidates if not each.seconds)]
    return {
        "chosen": list(chosen.overrides),
        "speedup": 1 / chosen.ratio,
        "rows": [plain(row, search.base, candidates.base.batch_size) for row in rows],
        "seconds": time.perf_counter() - began,
    }


def start(candidate: Candidate, seconds: float) -> Trial:
    assert candidate.run is not None
    return Trial(candidate.run.config, seconds)


def plain(row: Candidate, base: Candidate, samples: int) -> dict[str, Any]:
    """Return a candidate as plain values, in which what was not measured is None.

    `speedup` is over the baseline, with which the row `ties` if they cannot be told apart. After `pays_after_steps`,
    faster steps have made up for a later start, as that of compiled code. A step has `samples` samples.
    """
    known = bool(row.seconds)
    saved = base.step_seconds * (1 - row.ratio) if known else 0.0
    later = row.startup_seconds - base.startup_seconds
    return {
        "overrides": list(row.overrides),
        "results": row.results,
        "status": row.status,
        "reason": row.reason,
        "rounds": len(row.seconds),
        "samples_per_second": samples / row.step_seconds if known else None,
        "speedup": 1 / row.ratio if known else None,
        "ties": known and row is not base and not row.is_faster_than(base) and not base.is_faster_than(row),
        "memory_bytes": row.memory_bytes if known else None,
        "startup_seconds": row.startup_seconds if known else None,
        "pays_after_steps": math.ceil(max(0.0, later) / saved) if saved > 0 else None,
    }


def write_report(report: dict[str, Any], output_root: str) -> Path:
    """Write `report` to a new directory in `output_root`/tuned, and return the directory.

    The directory has the structure of conf/, and contains the report as `tune.json` and an experiment with the typed
    and the chosen overrides. Raises ConfigError or OSError if it cannot be written.
    """
    directory = run_directory.create(Path(output_root) / "tuned", None, report["chosen"])
    write_text(directory / "tune.json", json.dumps(report, indent=2) + "\n")
    (directory / "experiment").mkdir()
    comments = [experiment_words(report, "DIRECTORY"), f"Measured by runner tune on {cpu_model()}."]
    text = experiment_file([*report["typed"], *report["chosen"]], comments, report["config_dir"])
    write_text(directory / "experiment" / f"{EXPERIMENT}.yaml", text)
    return directory


def experiment_words(report: dict[str, Any], directory: str) -> str:
    """Return the command that trains the experiment in `directory`, and deletes keys, which an option file cannot."""
    deleted = [
        text for text in report["typed"] if text.startswith("~") and override_key(text) not in groups_in_defaults()
    ]
    return " ".join([experiment_command(directory, EXPERIMENT, report["config_dir"]), *map(shlex.quote, deleted)])


def render(report: dict[str, Any]) -> Group:
    """Render `report`, what `runner tune --json` prints, as tables."""
    rows, others = [], defaultdict(list)
    for row in report["rows"]:
        name = " ".join(row["overrides"]) or "the baseline"
        if row["samples_per_second"] is None:
            others[row["status"], row["reason"]].append(name)
            continue
        arrow, tie = "→ " * (row["overrides"] == report["chosen"]), ", a tie" * row["ties"]
        rate, speedup = significant(row["samples_per_second"], 3), f"{row['speedup']:.2f} ×{tie}"
        rows.append([f"{arrow}{name}", row["results"], rate, speedup, size(row["memory_bytes"])])
        rows[-1].append(f"{row['startup_seconds']:.1f} s")
    titles = ["candidate", "results", "samples/s", "speed-up", "memory", "first step"]
    parts: list[RenderableType] = [table("steps of the candidates, the fastest first", titles, rows, right_from=2)]
    if others:
        rows = [(status, reason, "\n".join(names)) for (status, reason), names in others.items()]
        parts.append(table("not measured", ["", "because", "candidates"], rows))
    whole = partial(Text, no_wrap=True, overflow="ignore")  # a command that is wrapped cannot be copied
    return Group(*parts, *map(whole, verdict(report)))


def verdict(report: dict[str, Any]) -> list[str]:
    """Return the lines that say what was chosen, and how to use it."""
    if not report["chosen"]:
        return [f"nothing is clearly faster than the baseline ({report['seconds']:.0f} s)"]
    config_dir = report["config_dir"]
    words = [*([] if config_dir is None else [f"--config-dir={config_dir}"]), *report["typed"], *report["chosen"]]
    lines = [f"chosen: {report['speedup']:.2f} × as fast as the baseline ({report['seconds']:.0f} s)"]
    if steps := sum(row["pays_after_steps"] or 0 for row in report["rows"] if row["overrides"] == report["chosen"]):
        lines.append(f"pays:   it starts later, and is ahead of the baseline after {steps:,} optimizer steps")
    lines.append(f"run:    python -m runner {shlex.join(words)}")
    if report["directory"] is not None:
        lines.append(f"        {experiment_words(report, os.path.relpath(report['directory']))}")
    return lines
