"""Figures of a comparison of runs. Only the extra `plot` installs seaborn, which draws them."""

from __future__ import annotations

import io
import itertools
import math
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import seaborn
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pandas import DataFrame, concat

from runner.analysis.comparison import BEST, LAST, RATE, STEP_SECONDS, Comparison, Row
from runner.analysis.output import one_line
from runner.analysis.saved_runs import is_number
from runner.analysis.split_curves import SplitCurve, fastest_pipelines, is_pipeline, split_curves
from runner.config.overrides import as_typed
from runner.system.utf8 import printable
from runner.tracking.event_file import scalars

NAMES = ("modes", "modes_and_pipeline", "split_size", "sweep", "heat_map", "curves")
"""The names of all figures that `pictures` may return."""

COLORS = ("#2f6f9f", "#c8553d", "#5b8c5a", "#8e6c8a", "#b8860b", "#4c4c4c")
_MAX_BARS, _MAX_LINES, _MAX_PANELS, _MAX_CELLS, _MAX_TICKS = 24, 6, 6, 16, 10
_MAX_CURVES = 120
"""The maximum number of runs whose event files are read. Reading one run takes a few milliseconds."""

_SECONDS, _STEPS = "seconds per step", "optimizer steps"


def pictures(compared: Comparison) -> dict[str, Figure]:
    """Return the figures that suit the compared runs by name; an empty dict if there is nothing to compare.

    Runs of several parallel modes have the run time of each mode, with and without a pipeline, and of the pipeline for
    each `split_size`. Other runs have the metric over each key and, if there are two, for each pair of values. If there
    is no figure over `split_size`, there are learning curves.
    """
    drawn: dict[str, Figure] = {}
    rows = sorted((row for row in compared.rows if STEP_SECONDS in row.measures), key=lambda row: row.runs[0].directory)
    plain, pipelines = [row for row in rows if not is_pipeline(row)], fastest_pipelines(rows)
    if len({row.runs[0].mode for row in plain}) > 1 and len(plain) <= _MAX_BARS:
        drawn["modes"] = _bars("Run time by parallel mode", compared, plain)
    if pipelines and plain and len(plain) + len(pipelines) <= _MAX_BARS:
        drawn["modes_and_pipeline"] = _bars("Run time with and without a pipeline", compared, [*plain, *pipelines])
    if curves := split_curves(rows):
        return drawn | {"split_size": _over_split_size(compared, curves)}
    trains = any(key.partition(".")[0] != "parallel" for key in compared.keys)  # all modes reach the same quality
    return (_of_sweep(compared) if trains and len(compared.rows) > 1 else {}) | _curves(compared) | drawn


# ---------------------------------------------------------------------------------------------------------------------
# Texts and axes


def shown(value: object, longest: int = 26) -> str:
    """Return a config value as the user types it, shortened to `longest` characters to fit into a figure.

    Dollar signs are escaped, because matplotlib would read them as the beginning of a formula.
    """
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)
    text = printable(" ".join(as_typed(value)[:400].split()))
    if len(text) > longest:  # the end of a path says more than its beginning
        text = f"…{text[-longest + 1 :]}" if "/" in text else f"{text[: longest - 1]}…"
    return text.replace("$", r"\$")


def distinct(texts: Iterable[str]) -> list[str]:
    """Make texts distinct by appending a number to each repetition of a text, such as `text (2)`."""
    counts, found = Counter[str](), []
    for text in texts:
        counts[text] += 1
        found.append(text if counts[text] == 1 else f"{text} ({counts[text]})")
    return found


def _labels(compared: Comparison, rows: Sequence[Row]) -> list[str]:
    """Return a different label for each of `rows`, with its values of all keys."""
    values = [[f"{shown(key, 40)}={shown(value, 20)}" for key, value in row.values.items()] for row in rows]
    return distinct(textwrap.fill(", ".join(each), 60) or "all runs" for each in values)


def _canvas(compared: Comparison, title: str, panel: tuple[float, float], panels: int = 1) -> tuple[Figure, list[Axes]]:
    """Return a figure without data, and the axes of its panels, of which each has this width and height in inches."""
    counts = sorted({len(row.runs) for row in compared.rows})
    repeats = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else f"{counts[0]}"
    spread = "; error bars and bands: ± standard deviation" if counts[-1] > 1 else ""
    machines = one_line("; ".join(sorted({run.machine for row in compared.rows for run in row.runs})))
    across = min(panels, 3)
    down = math.ceil(panels / across)
    figure = Figure(figsize=(panel[0] * across, panel[1] * down + 0.4), dpi=120, layout="constrained")
    figure.suptitle(shown(title, 90), x=0.01, ha="left", fontsize=11, fontweight="bold")
    axes = [figure.add_subplot(down, across, 1 + number) for number in range(panels)]
    caption = f"{textwrap.shorten(machines, 60)}. Runs per point: {repeats}{spread}"
    caption = textwrap.fill(caption, int(15 * (panel[0] * across - 0.8)))
    axes[0].set_title(caption.replace("$", r"\$"), loc="left", fontsize=8, color="#666666")
    for each in axes:
        each.grid(axis="y", color="#dddddd", lw=0.7)
        each.set_axisbelow(True)
        seaborn.despine(ax=each)
    return figure, axes


def png(figure: Figure) -> tuple[bytes, int, int]:
    """Return a figure as a PNG file, and its height and width in pixels."""
    file = io.BytesIO()
    figure.savefig(file)
    width, height = figure.canvas.get_width_height()
    return file.getvalue(), height, width


def _scale_x(axes: Axes, values: Iterable[float]) -> None:
    """Choose a logarithmic x-axis for values of several magnitudes, and a tick at each value if there are few."""
    ordered = sorted(values)
    positive = [value for value in ordered if value > 0]
    if ordered[0] >= 0 and positive and positive[-1] >= 10 * positive[0]:
        axes.set_xscale("symlog", linthresh=positive[0], linscale=0.5) if ordered[0] == 0 else axes.set_xscale("log")
    if len(ordered) <= _MAX_TICKS:
        axes.set_xticks(ordered, [f"{value:.6g}" for value in ordered])
        axes.minorticks_off()


def _scale_y(axes: Axes, values: Any) -> None:
    if values.min() > 0 and values.max() > 100 * values.min():
        axes.set_yscale("log")


# ---------------------------------------------------------------------------------------------------------------------
# Run times


def _bars(title: str, compared: Comparison, rows: Sequence[Row]) -> Figure:
    """Draw a bar per row with the seconds per step, the throughput, and the speed-up over one device."""
    figure, [axes] = _canvas(compared, title, (8.5, 1.4 + 0.36 * len(rows)))
    modes = list(dict.fromkeys(row.runs[0].mode for row in rows))
    for at, row in enumerate(rows):
        seconds, speed = row.measures[STEP_SECONDS], compared.speed_up(row)
        rate = row.measures[RATE].mean if RATE in row.measures else math.nan
        color = COLORS[modes.index(row.runs[0].mode) % len(COLORS)]
        bar = 0.0 if math.isnan(seconds.deviation) else seconds.deviation
        axes.barh(at, seconds.mean, 0.66, xerr=bar or None, color=color, error_kw={"capsize": 4, "lw": 1.2})
        text = f"{rate:{',.0f' if rate >= 100 else '.3g'}} samples/s"
        text += f", {speed:.2f} ×" if speed and row.runs[0].mode != "single" else ""
        axes.annotate(text, (seconds.mean + bar, at), (5, 0), textcoords="offset points", va="center", fontsize=8.5)
    axes.set_yticks(range(len(rows)), _labels(compared, rows), fontsize=9)
    axes.invert_yaxis()
    axes.margins(x=0.3)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel(_SECONDS)
    return figure


def _over_split_size(compared: Comparison, curves: Sequence[SplitCurve]) -> Figure:
    """Draw the measured times with error bars, the lower bound by GPipe's bubble, and a star at the best point."""
    figure, [axes] = _canvas(compared, "Run time of the pipeline over split_size", (8, 4.0))
    for color, curve in zip(itertools.cycle(COLORS), curves, strict=False):
        sizes, spreads = [size for size, _ in curve.points], [row.measures[STEP_SECONDS] for _, row in curve.points]
        means, bars = [spread.mean for spread in spreads], [spread.deviation for spread in spreads]
        name = shown(curve.label, 60) or "measured"
        axes.errorbar(sizes, means, bars, color=color, marker="o", ms=4, lw=1.4, capsize=4, label=name)
        fine = [sizes[0] * (sizes[-1] / sizes[0]) ** (i / 200) for i in range(201)]
        bound = [curve.seconds_without_bubble * curve.slowdown(size) for size in fine]
        theory = f"GPipe's bubble alone: {curve.seconds_without_bubble:.3g} s · (m+{curve.stages - 1})/m"
        axes.plot(fine, bound, color=color, ls="--", lw=1.2, label=theory)
        size, best = curve.best
        seconds = best.measures[STEP_SECONDS].mean
        star = {"marker": "*", "ms": 16, "ls": "", "color": color, "mec": "white", "zorder": 5}
        axes.plot(size, seconds, label=f"best: {size}, {seconds:.3g} s", **star)
        if speed := compared.speed_up(best):
            axes.axhline(speed * seconds, color="#777777", ls=":", lw=1.2, label=f"single: {speed * seconds:.3g} s")
    axes.set_xscale("log")  # the time changes most between small sizes
    sizes = sorted({size for curve in curves for size, _ in curve.points})
    axes.set_xticks(sizes, map(str, sizes))
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("split_size: samples in a micro-batch")
    axes.set_ylabel(_SECONDS)
    axes.legend(frameon=False, fontsize=9)
    return figure


# ---------------------------------------------------------------------------------------------------------------------
# Over the swept keys


def _of_sweep(compared: Comparison) -> dict[str, Figure]:
    """Return the figure `sweep` and, if there are two keys, `heat_map`; nothing if no run has a quality."""
    runs = [(run, compared.measured(run)) for row in compared.rows for run in row.runs]
    runs = sorted((each for each in runs if compared.quality in each[1]), key=lambda each: each[0].directory)
    if not runs:
        return {}
    quality, seconds, *names = distinct(
        [shown(compared.title(compared.quality), 40), _SECONDS, *map(shown, compared.keys)]
    )
    # The columns have the names that are drawn. A type checker does not know their types.
    data: Any = DataFrame(
        {
            name: _drawable([run.labels.get(key) for run, _ in runs])
            for name, key in zip(names, compared.keys, strict=True)
        }
    )
    data[quality] = [measured[compared.quality] for _, measured in runs]
    data[seconds] = [measured.get(STEP_SECONDS, math.nan) for _, measured in runs]
    sizes = [data[name].nunique() for name in names]
    drawn: dict[str, Figure] = {}
    if len(names) == 2 and max(sizes) <= _MAX_CELLS and len(compared.rows) >= 0.75 * math.prod(sizes):
        is_best_bright = compared.direction == "max" and compared.quality in (BEST, LAST)
        drawn["heat_map"], [axes] = _canvas(compared, f"{quality} over two keys", (8, 5))
        cells = data.pivot_table(index=names[0], columns=names[1], values=quality)
        seaborn.heatmap(cells, cmap="viridis" if is_best_bright else "viridis_r", annot=True, fmt=".4g", ax=axes)
    panels = [(name, quality) for name in names if _is_numeric(data[name]) or data[name].nunique() <= _MAX_CELLS]
    if len(names) == 1 and compared.quality != STEP_SECONDS and data[seconds].notna().any():
        panels += [(name, seconds) for name, _ in panels]
    return drawn | ({"sweep": _over_keys(compared, data, names, panels[:_MAX_PANELS])} if panels else {})


def _drawable(values: Sequence[Any]) -> list[float] | list[str]:
    """Return numbers, if all values are numbers; otherwise a short text for each value, different for each of them."""
    if all(map(is_number, values)):
        return [float(value) for value in values]
    by_name = {repr(value): value for value in values}
    texts = dict(zip(by_name, distinct(map(shown, by_name.values())), strict=True))
    return [texts[repr(value)] for value in values]


def _is_numeric(values: Any) -> bool:
    return values.dtype.kind == "f"


def _in_order(values: Any) -> list[Any]:
    """Return the distinct values: numbers in ascending order, texts in the order in which they occur."""
    return sorted(values.unique()) if _is_numeric(values) else list(values.unique())


def _over_keys(compared: Comparison, data: Any, names: list[str], panels: list[tuple[str, str]]) -> Figure:
    """Draw a panel for each pair of a key and a measure: lines with bands over numbers, bars over options.

    If there are two keys, colors show the other one; if there are more, the runs with any values of the others count.
    """
    title = f"{panels[0][1]} over {', '.join(dict.fromkeys(name for name, _ in panels))}"
    figure, axes = _canvas(compared, title, (5.0, 3.8), len(panels))
    for each, (name, column) in zip(axes, panels, strict=True):
        look: dict[str, Any] = {"data": data, "x": name, "y": column, "ax": each, "color": COLORS[0]}
        other = next((key for key in names if key != name), name)
        if len(names) == 2 and data[other].nunique() <= _MAX_LINES:
            texts = {value: shown(value) for value in _in_order(data[other])}
            look |= {"hue": data[other].map(texts), "hue_order": list(texts.values()), "palette": COLORS[: len(texts)]}
            del look["color"]
        if not _is_numeric(data[name]):
            order = _in_order(data[name])
            seaborn.barplot(**look, order=order, errorbar="sd", saturation=1, capsize=0.2)
            for bars in each.containers:
                each.bar_label(bars, fmt="%.4g", fontsize=8, label_type="center", color="white")  # pyright: ignore[reportArgumentType]
            if sum(map(len, order)) > 30:
                each.set_xticks(range(len(order)), order, rotation=30, ha="right")
        elif len(names) > 2 and not data[name].duplicated().any():  # a line through single values would be noise
            seaborn.scatterplot(**look)
        else:
            seaborn.lineplot(**look, errorbar="sd", marker="o")
        if _is_numeric(data[name]):
            _scale_x(each, data[name].unique())
        if column == _SECONDS:
            each.set_ylim(0)  # so that noise does not look like a difference
        else:
            _scale_y(each, data[column])
        each.margins(y=0.1)
    return figure


# ---------------------------------------------------------------------------------------------------------------------
# Learning curves


def _curves(compared: Comparison) -> dict[str, Figure]:
    """Return the figure `curves`: the best settings in color, and the other ones in gray; empty without event files.

    It shows the first of these metrics that any run logged at 3 or more steps: the one that is compared, the training
    metric of the same name, the training loss.
    """
    wanted = [compared.metric, f"train/{compared.metric.rpartition('/')[2]}", "train/loss"]
    counts = itertools.accumulate(len(row.runs) for row in compared.rows)
    rows = [row for row, count in zip(compared.rows, counts, strict=True) if count <= _MAX_CURVES]
    read = [(number, scalars(run.directory, wanted)) for number, row in enumerate(rows) for run in row.runs]
    tag = next((tag for tag in wanted if any(len(curves.get(tag, ())) >= 3 for _, curves in read)), None)
    if tag is None:
        return {}
    y, labels = shown(tag, 40), _labels(compared, rows[:_MAX_LINES])
    found = [(number, curves[tag]) for number, curves in read if tag in curves]
    tables = [DataFrame({_STEPS: curve.keys(), y: curve.values()}).assign(row=number) for number, curve in found]
    data: Any = concat(tables)
    figure, [axes] = _canvas(compared, f"{tag} over steps", (8.6, 4.4))
    look: dict[str, Any] = {"x": _STEPS, "y": y, "ax": axes}
    others = data[data.row >= len(labels)].groupby(["row", _STEPS], as_index=False)[y].mean()
    if len(others):
        seaborn.lineplot(others, **look, units="row", estimator=None, color="#cccccc", lw=0.8)
        axes.plot([], [], color="#cccccc", lw=0.8, label=f"{others.row.nunique()} others")
    for number, (label, color) in enumerate(zip(labels, COLORS, strict=False)):
        if (curve := data[data.row == number]).size:
            seaborn.lineplot(curve, **look, errorbar="sd", color=color, lw=1.6, label=label)
    _scale_y(axes, data[y])
    axes.legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(1, 1))
    return {"curves": figure}
