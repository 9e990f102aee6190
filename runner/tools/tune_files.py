"""The files that `runner.tools.tune` writes: the result, an experiment with the chosen overrides, and a picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from runner.cli.plan_jobs import experiment_command
from runner.config.options import option_files
from runner.config.overrides import override_key
from runner.storage import run_directory
from runner.storage.durable_write import write_text
from runner.system.cpu import cpu_model
from runner.system.installed import is_installed
from runner.tools.tune_tables import EXPERIMENT, PICTURE, deleted_keys, name_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_BARS = 16


def write(report: dict[str, Any], output_root: str) -> Path:
    """Write `report` to a new directory in `output_root`/tuned, and return the directory.

    The directory contains the report as `tune.json`, an experiment with the typed and the chosen overrides and, if
    matplotlib is installed, a picture. It has the structure of conf/, so that the experiment can be chosen if the
    directory is passed to `--config-dir`. If a typed override deletes a key, there is no experiment, because an option
    file cannot delete keys.

    Args:
        report: the result of `runner.tools.tune.tune`, without `directory`.
        output_root: the directory for run directories.

    Raises:
        ConfigError: if the directory cannot be created.
        OSError: if a file cannot be written.
    """
    directory = run_directory.create(Path(output_root) / "tuned", None, report["chosen"])
    write_text(directory / "tune.json", json.dumps(report, indent=2) + "\n")
    if not deleted_keys(report):
        (directory / "experiment").mkdir()
        text = experiment([*report["typed"], *report["chosen"]], report["config_dir"])
        write_text(directory / "experiment" / f"{EXPERIMENT}.yaml", text)
    if is_installed("matplotlib"):
        picture(report).savefig(directory / PICTURE)
    return directory


def experiment(overrides: Sequence[str], config_dir: str | None = None) -> str:
    """Return the text of an option file for conf/experiment/ with the same effect as `overrides`.

    Args:
        overrides: overrides that delete no key.
        config_dir: a directory with the user's own options, which the overrides may choose; None to use only conf/.
    """
    groups = option_files(*([Path(config_dir).expanduser()] if config_dir else []))
    defaults: list[Any] = []
    content: Any = OmegaConf.create()
    for text in overrides:
        key, value = override_key(text), text.partition("=")[2]
        if key == "experiment":
            defaults.insert(0, value)
        elif key in groups:
            defaults = [each for each in defaults if not isinstance(each, dict) or f"override /{key}" not in each]
            defaults.append({f"override /{key}": value})
        else:
            OmegaConf.update(content, key, OmegaConf.from_dotlist([f"v={value}"])["v"])
    head = f"# @package _global_\n# {experiment_command('DIRECTORY', EXPERIMENT, config_dir)}\n"
    listed = OmegaConf.to_yaml(OmegaConf.create({"defaults": [*defaults, "_self_"]}))
    values = OmegaConf.to_yaml(content) if content else ""
    return f"{head}# Measured by runner.tools.tune on {cpu_model()}.\n{listed}{values}"


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
