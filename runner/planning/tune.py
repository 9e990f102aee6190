"""`runner tune`: the search for the fastest way to train a run, its tables, and the experiment that it writes."""

from __future__ import annotations

import json
import os
import shlex
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from runner.config.experiment_file import experiment_command, experiment_file
from runner.config.options import groups_in_defaults
from runner.config.overrides import override_key
from runner.planning.candidates import Candidate, Candidates, Compose
from runner.planning.search import BUDGET_SPENT, Search
from runner.planning.trial import Trial
from runner.storage import run_directory
from runner.storage.files import write_text
from runner.system.cpu import cpu_model
from runner.system.tables import significant, size, table

EXPERIMENT = "tuned"
"""The name of the experiment with the chosen overrides."""

_MEASURED = ("samples_per_second", "spread", "speedup", "ties", "memory_bytes", "startup_seconds", "break_even_steps")


def tune(
    compose: Compose,
    typed: Sequence[str],
    budget: float,
    allowed: Iterable[str] = (),
    report: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Measure the candidates of a run, and return the result as plain values.

    Args:
        compose, typed: as in `Candidates`.
        budget: maximum duration in seconds.
        allowed, report: as in `Search`.

    Returns:
        A dict: `chosen`, the chosen overrides; `speedup`, the step time of the baseline divided by that of the choice;
        `seconds`, how long the call took; and `rows`, a dict for each candidate (see `plain`), those that were measured
        first, from the fastest to the slowest.

    Raises:
        ConfigError: if the run is refused.
        TrialError: if the run cannot train, or its first steps take longer than the budget.
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

    `spread` are the first and the third quartile of `samples_per_second`; `speedup` is over the baseline, with which
    the row `ties` if they cannot be told apart; and `break_even_steps` is the number of steps after which the row has
    made up for a slower start, None if it never does. A step has `samples` samples.
    """
    found: dict[str, Any] = {"overrides": list(row.overrides), "results": row.results}
    found |= {"status": row.status, "reason": row.reason, "rounds": len(row.seconds)} | dict.fromkeys(_MEASURED)
    if not row.seconds:
        return found
    saved = base.step_seconds * (1 - row.ratio)
    rates = [samples / seconds for seconds in row.seconds]
    low, _, high = statistics.quantiles(rates, n=4, method="inclusive") if len(rates) > 1 else rates * 3
    return found | {
        "samples_per_second": samples / row.step_seconds,
        "spread": [low, high],
        "speedup": 1 / row.ratio,
        "ties": row is not base and not row.is_faster_than(base) and not base.is_faster_than(row),
        "memory_bytes": row.memory_bytes,
        "startup_seconds": row.startup_seconds,
        "break_even_steps": max(0.0, (row.startup_seconds - base.startup_seconds) / saved) if saved > 0 else None,
    }


def write(report: dict[str, Any], output_root: str) -> Path:
    """Write `report` to a new directory in `output_root`/tuned, and return the directory.

    The directory has the structure of conf/, and contains the report as `tune.json` and an experiment with the typed
    and the chosen overrides, unless a typed override deletes a key, which an option file cannot.

    Raises:
        ConfigError: if the directory cannot be created.
        OSError: if a file cannot be written.
    """
    directory = run_directory.create(Path(output_root) / "tuned", None, report["chosen"])
    write_text(directory / "tune.json", json.dumps(report, indent=2) + "\n")
    if not deletes(report):
        (directory / "experiment").mkdir()
        command = experiment_command("DIRECTORY", EXPERIMENT, report["config_dir"])
        comments = [command, f"Measured by runner tune on {cpu_model()}."]
        text = experiment_file([*report["typed"], *report["chosen"]], comments, report["config_dir"])
        write_text(directory / "experiment" / f"{EXPERIMENT}.yaml", text)
    return directory


def render(report: dict[str, Any]) -> Group:
    """Render `report`, what `runner tune --json` prints, as tables."""
    rows, others = [], defaultdict(list)
    for row in report["rows"]:
        name = " ".join(row["overrides"]) or "the baseline"
        if row["samples_per_second"] is None:
            others[row["status"], row["reason"]].append(name)
            continue
        arrow = "→ " * (row["overrides"] == report["chosen"])
        rows.append([f"{arrow}{name}", *cells(row)])
    titles = ["candidate", "results", "samples/s", "speed-up", "memory", "first step", "pays after"]
    parts: list[RenderableType] = [table("steps of the candidates, the fastest first", titles, rows, right_from=2)]
    if others:
        rows = [(status, reason, "\n".join(names)) for (status, reason), names in others.items()]
        parts.append(table("not measured", ["", "because", "candidates"], rows))
    whole = partial(Text, no_wrap=True, overflow="ignore")  # a command that is wrapped cannot be copied
    return Group(*parts, *map(whole, verdict(report)))


def cells(row: dict[str, Any]) -> list[str]:
    """Return a row of the table of measured candidates, without the name of the candidate."""
    (low, high), steps, is_other = row["spread"], row["break_even_steps"], bool(row["overrides"])
    return [
        row["results"],
        f"{significant(row['samples_per_second'], 3)} ({significant(low, 3)} – {significant(high, 3)})",
        f"{row['speedup']:.2f} ×{', a tie' if row['ties'] else ''}" if is_other else "1",
        size(row["memory_bytes"]),
        f"{row['startup_seconds']:.1f} s",
        "" if not is_other else "never" if steps is None else f"{steps:,.0f} steps" if steps else "at once",
    ]


def verdict(report: dict[str, Any]) -> list[str]:
    """Return the lines that say what was chosen, and how to use it."""
    lines = []
    if spent := sum(row["reason"] == BUDGET_SPENT for row in report["rows"]):
        more = f"--budget {2 * report['budget']:.0f} takes more time"
        lines.append(f"{spent} candidate{'s were' if spent > 1 else ' was'} not measured: {BUDGET_SPENT} ({more})")
    if not report["chosen"]:
        return [*lines, f"nothing is clearly faster than the baseline ({report['seconds']:.0f} s)"]
    config_dir = report["config_dir"]
    words = [*([] if config_dir is None else [f"--config-dir={config_dir}"]), *report["typed"], *report["chosen"]]
    lines.append(f"chosen: {report['speedup']:.2f} × as fast as the baseline ({report['seconds']:.0f} s)")
    lines.append(f"run:    python -m runner {shlex.join(words)}")
    if report["directory"] is not None and not deletes(report):
        lines.append(f"        {experiment_command(os.path.relpath(report['directory']), EXPERIMENT, config_dir)}")
    return lines


def deletes(report: dict[str, Any]) -> bool:
    """Return whether the typed overrides delete a key that is not a config group."""
    return any(text.startswith("~") and override_key(text) not in groups_in_defaults() for text in report["typed"])
