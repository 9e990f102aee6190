"""The result of `runner tune`: tables for a terminal, and a directory with an experiment."""

from __future__ import annotations

import json
import os
import shlex
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from runner.config.experiment_file import experiment_command, experiment_file
from runner.config.options import groups_in_defaults
from runner.config.overrides import override_key
from runner.planning.formatting import significant, size
from runner.planning.search import BUDGET_SPENT
from runner.storage import run_directory
from runner.storage.files import write_text
from runner.system.cpu import cpu_model
from runner.system.tables import table

EXPERIMENT = "tuned"
"""The name of the experiment with the chosen overrides."""

_BUSY = 0.1
"""The noise (see `Search.noise`) above which the report says that the machine is busy."""


def write(report: dict[str, Any], output_root: str) -> Path:
    """Write `report` to a new directory in `output_root`/tuned, and return the directory.

    The directory has the structure of conf/, and contains the report as `tune.json` and an experiment with the typed
    and the chosen overrides. If a typed override deletes a key, there is no experiment, because an option file cannot
    delete keys.

    Raises:
        ConfigError: if the directory cannot be created.
        OSError: if a file cannot be written.
    """
    directory = run_directory.create(Path(output_root) / "tuned", None, report["chosen"])
    write_text(directory / "tune.json", json.dumps(report, indent=2) + "\n")
    if not deleted_keys(report):
        (directory / "experiment").mkdir()
        command = experiment_command("DIRECTORY", EXPERIMENT, report["config_dir"])
        comments = [command, f"Measured by runner tune on {cpu_model()}."]
        text = experiment_file([*report["typed"], *report["chosen"]], comments, report["config_dir"])
        write_text(directory / "experiment" / f"{EXPERIMENT}.yaml", text)
    return directory


def render(report: dict[str, Any]) -> Group:
    """Render `report`, the result of `runner.commands.tune.tuned`, as tables."""
    names = {False: "the baseline", True: "→ the baseline"}
    rows, others = [], defaultdict(list)
    for row in report["rows"]:
        name = " ".join(row["overrides"])
        if row["samples_per_second"] is None:
            others[row["status"], row["reason"]].append(name)
            continue
        chosen = row["overrides"] == report["chosen"]
        rows.append([f"{'→ ' * chosen}{name}" if name else names[chosen], *cells(row)])
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
    if report["noise"] > _BUSY:
        why = f"the steps of the baseline vary by ± {report['noise']:.0%}"
        lines.append(f"the machine is busy: {why}, so that smaller differences cannot be seen")
    if spent := sum(row["reason"] == BUDGET_SPENT for row in report["rows"]):
        more = f"--budget {2 * report['budget']:.0f} takes more time"
        lines.append(f"{spent} candidate{'s were' if spent > 1 else ' was'} not measured: {BUDGET_SPENT} ({more})")
    if not report["chosen"]:
        return [*lines, f"nothing is clearly faster than the baseline ({report['seconds']:.0f} s)"]
    config_dir = report["config_dir"]
    words = [*([] if config_dir is None else [f"--config-dir={config_dir}"]), *report["typed"], *report["chosen"]]
    lines.append(f"chosen: {report['speedup']:.2f} × as fast as the baseline ({report['seconds']:.0f} s)")
    lines.append(f"run:    python -m runner {shlex.join(words)}")
    if report["directory"] is None:
        return lines
    if deleted := deleted_keys(report):
        return [*lines, f"        there is no experiment: an option file cannot delete {', '.join(deleted)}"]
    return [*lines, f"        {experiment_command(os.path.relpath(report['directory']), EXPERIMENT, config_dir)}"]


def deleted_keys(report: dict[str, Any]) -> list[str]:
    """Return the keys that the typed overrides delete, except for config groups."""
    deleted = [override_key(text) for text in report["typed"] if text.startswith("~")]
    return [key for key in deleted if key not in groups_in_defaults()]
