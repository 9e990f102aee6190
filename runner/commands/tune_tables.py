"""The result of `runner tune` as tables for a terminal."""

from __future__ import annotations

import os
import shlex
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from runner.cli.experiment_file import experiment_command
from runner.config.options import groups_in_defaults
from runner.config.overrides import override_key
from runner.planning.formatting import significant, size
from runner.planning.tuning import BUDGET_SPENT
from runner.system.installed import is_installed

AS_IT_IS = "as it is"
EXPERIMENT = "tuned"
"""The name of the experiment with the chosen overrides."""

PICTURE = "tune.png"
_BUSY = 0.1
"""The noise (see `Search.noise`) above which the report says that the machine is busy."""


def render(report: dict[str, Any]) -> Group:
    """Render `report`, the result of `runner.commands.tune.tune`, as tables."""
    parts: list[RenderableType] = [_measured(report)]
    if others := _others(report):
        parts.append(others)
    whole = partial(Text, no_wrap=True, overflow="ignore")  # a command that is wrapped cannot be copied
    return Group(*parts, *map(whole, verdict(report)))


def name_of(row: dict[str, Any]) -> str:
    """Return the overrides of a row as text; `AS_IT_IS` if there are none."""
    return " ".join(row["overrides"]) or AS_IT_IS


def _measured(report: dict[str, Any]) -> Table:
    table = _table("steps of the candidates, the fastest first", ["candidate", "results", "samples/s", "speed-up"])
    for title in ("memory", "first step", "pays after"):
        table.add_column(title, justify="right")
    for row in report["rows"]:
        if row["samples_per_second"] is not None:
            table.add_row(*map(Text, cells(row, report)))
    return table


def cells(row: dict[str, Any], report: dict[str, Any]) -> list[str]:
    """Return one row of the table of candidates as texts.

    Args:
        row: a dict in `report["rows"]` that describes a measured candidate.
        report: the result of `runner.commands.tune.tune`.
    """
    low, high = row["spread"]
    mark = "→ " if row["overrides"] == report["chosen"] else ""
    steps = row["break_even_steps"]
    return [
        f"{mark}{name_of(row)}",
        row["results"],
        f"{significant(row['samples_per_second'], 3)} ({significant(low, 3)} – {significant(high, 3)})",
        f"{row['speedup']:.2f} ×{', a tie' if row['ties'] else ''}" if row["overrides"] else "1",
        size(row["memory_bytes"]),
        f"{row['startup_seconds']:.1f} s",
        "" if not row["overrides"] else "never" if steps is None else f"{steps:,.0f} steps" if steps else "at once",
    ]


def _others(report: dict[str, Any]) -> Table | None:
    """Return a table of the candidates that were not measured, one row per reason; None if all were measured."""
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for row in report["rows"]:
        if row["samples_per_second"] is None:
            groups[row["status"], row["reason"]].append(name_of(row))
    table = _table("not measured", ["", "because", "candidates"])
    for (status, reason), names in groups.items():
        table.add_row(Text(status), Text(reason), Text("\n".join(names)))
    return table if groups else None


def verdict(report: dict[str, Any]) -> list[str]:
    """Return the lines that say what was chosen, and how to use it."""
    noise = report["noise"]
    lines = []
    if noise > _BUSY:
        why = f"the config's own steps vary by ± {noise:.0%}"
        lines.append(f"the machine is busy: {why}, so that smaller differences cannot be seen")
    if spent := sum(row["reason"] == BUDGET_SPENT for row in report["rows"]):
        more = f"--budget {2 * report['budget']:.0f} takes more time"
        lines.append(f"{spent} candidate{'s were' if spent > 1 else ' was'} not measured: {BUDGET_SPENT} ({more})")
    if not report["chosen"]:
        return [*lines, f"nothing is clearly faster than the config as it is ({report['seconds']:.0f} s)"]
    own = report["config_dir"]
    words = [*([] if own is None else [f"--config-dir={own}"]), *report["typed"], *report["chosen"]]
    lines.append(f"chosen: {report['speedup']:.2f} × as fast as the config as it is ({report['seconds']:.0f} s)")
    lines.append(f"run:    python -m runner {shlex.join(words)}")
    if report["directory"] is None:
        return lines
    directory = os.path.relpath(report["directory"])
    if deleted := deleted_keys(report):
        lines.append(f"        there is no experiment: an option file cannot delete {', '.join(deleted)}")
    else:
        lines.append(f"        {experiment_command(directory, EXPERIMENT, own)}")
    if is_installed("matplotlib"):
        lines.append(f"look:   {shlex.quote(os.path.join(directory, PICTURE))}")
    else:
        lines.append("there is no picture: matplotlib draws it, which pip install matplotlib installs")
    return lines


def deleted_keys(report: dict[str, Any]) -> list[str]:
    """Return the keys that the typed overrides delete, except for config groups."""
    deleted = [override_key(text) for text in report["typed"] if text.startswith("~")]
    return [key for key in deleted if key not in groups_in_defaults()]


def _table(title: str, titles: Sequence[str]) -> Table:
    table = Table(box=SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", show_header=any(titles))
    for number, name in enumerate(titles):
        table.add_column(name, overflow="fold", justify="right" if number > 1 and any(titles[:1]) else "left")
    return table
