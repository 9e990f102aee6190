"""The files that `runner tune` writes: the result, an experiment with the chosen overrides, and a picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.cli.experiment_file import experiment_command, experiment_file
from runner.commands.tune_tables import EXPERIMENT, PICTURE, deleted_keys, name_of
from runner.storage import run_directory
from runner.storage.durable_write import write_text
from runner.system.cpu import cpu_model
from runner.system.installed import is_installed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_BARS = 16


def write(report: dict[str, Any], output_root: str) -> Path:
    """Write `report` to a new directory in `output_root`/tuned, and return the directory.

    The directory contains the report as `tune.json`, an experiment with the typed and the chosen overrides and, if
    matplotlib is installed, a picture. The directory has the structure of conf/: pass it to `--config-dir` to use the
    experiment. If a typed override deletes a key, there is no experiment, because an option file cannot delete keys.

    Args:
        report: the result of `runner.commands.tune.tune`, without `directory`.
        output_root: the directory for run directories.

    Raises:
        ConfigError: if the directory cannot be created.
        OSError: if a file cannot be written.
    """
    directory = run_directory.create(Path(output_root) / "tuned", None, report["chosen"])
    write_text(directory / "tune.json", json.dumps(report, indent=2) + "\n")
    if not deleted_keys(report):
        (directory / "experiment").mkdir()
        config_dir = report["config_dir"]
        command = experiment_command("DIRECTORY", EXPERIMENT, config_dir)
        comments = [command, f"Measured by runner tune on {cpu_model()}."]
        text = experiment_file([*report["typed"], *report["chosen"]], comments, config_dir)
        write_text(directory / "experiment" / f"{EXPERIMENT}.yaml", text)
    if is_installed("matplotlib"):
        picture(report).savefig(directory / PICTURE)
    return directory


def picture(report: dict[str, Any]) -> Figure:
    """Return a figure with the throughput of the 16 fastest candidates as bars; error bars show the quartiles."""
    from runner.tracking.charts import COLORS, canvas, shown  # imported here, because they need matplotlib

    rows = [row for row in report["rows"] if row["samples_per_second"] is not None][:_MOST_BARS]
    kinds = {kind: COLORS[i % len(COLORS)] for i, kind in enumerate(dict.fromkeys(row["results"] for row in rows))}
    caption = " ".join(report["typed"]) or "the default config"
    figure, (axes,) = canvas("Ways to train the same run", caption, (8.5, 1.3 + 0.34 * len(rows)))
    for at, row in enumerate(rows):
        low, high = row["spread"]
        rate = row["samples_per_second"]
        axes.barh(at, rate, 0.66, color=kinds[row["results"]], label=row["results"])
        axes.errorbar(rate, at, None, [[rate - low], [high - rate]], color="#222222", capsize=4, lw=1.2)
        text = f"{row['speedup']:.2f} ×" if row["overrides"] else ""
        axes.annotate(text, (high, at), (6, 0), textcoords="offset points", va="center", fontsize=8.5)
    labels = [("→ " if row["overrides"] == report["chosen"] else "") + shown(name_of(row), 70) for row in rows]
    axes.set_yticks(range(len(rows)), labels, fontsize=8)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.margins(x=0.15)
    axes.grid(visible=False, axis="y")
    axes.grid(axis="x", color="#dddddd", lw=0.7)
    axes.set_xlabel("samples per second")
    handles, names = axes.get_legend_handles_labels()
    by_name = dict(zip(names, handles, strict=True))
    if len(by_name) > 1:
        axes.legend(by_name.values(), by_name.keys(), title="results", frameon=False, fontsize=8, loc="lower right")
    return figure
