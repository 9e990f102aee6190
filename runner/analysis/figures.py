"""Figures of a comparison of runs. Only the extra `plot` installs seaborn, which draws them."""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Sequence
from typing import Any

import seaborn
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pandas import Categorical, DataFrame, concat

from runner.analysis.comparison import RATE, STEP_SECONDS, Comparison, Row
from runner.analysis.saved_runs import MeasuredRun, is_number
from runner.analysis.split_curves import SPLIT, SplitCurve, seconds_of, split_curves
from runner.config.errors import shortened
from runner.config.overrides import as_typed
from runner.system.secrets import printable
from runner.tracking.event_file import EventReader

NAMES = ("modes", "modes_and_pipeline", "split_size", "front", "sweep", "heat_map", "differences", "curves", "compute")
"""The names of all figures that `pictures` may return."""

COLORS = ("#2f6f9f", "#c8553d", "#5b8c5a", "#8e6c8a", "#b8860b", "#4c4c4c")
_MAX_BARS, _MAX_LINES, _MAX_PANELS, _MAX_CELLS, _MAX_TICKS = 24, len(COLORS), 6, 16, 10

_SECONDS, _STEPS, _COMPUTE = "seconds per step", "optimizer steps", "TFLOP of training"


def pictures(compared: Comparison) -> dict[str, Figure]:
    """Return the figures that suit the compared runs by name; an empty dict if there is nothing to compare.

    Runs of several parallel modes have the run time of each mode, with and without a pipeline, and of the pipeline for
    each `split_size`. Other runs have the metric over each key and, if there are two, for each pair of values; with
    several seeds, also the difference of each row to the best. If there is no figure over `split_size`, there are
    learning curves. Several metrics have their front; the other figures show the first of them.
    """
    drawn: dict[str, Figure] = {"front": _front(compared)} if compared.front else {}
    rows = sorted((row for row in compared.rows if STEP_SECONDS in row.measures), key=lambda row: row.runs[0].directory)
    plain = [row for row in rows if SPLIT not in row.runs[0].labels]
    by_others = {row.other_values: row for row in sorted(rows, key=seconds_of, reverse=True) if row not in plain}
    pipelines = [row for row in rows if row in by_others.values()]  # the fastest of those that differ only in the mode
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


def shown(text: str, width: int = 30) -> str:
    """Return a text of a run in lines of `width` characters, so that matplotlib does not read it as a formula."""
    return textwrap.fill(shortened(printable(text), 400), width).replace("$", r"\$")


def _labels(rows: Sequence[Row]) -> list[str]:
    values = [", ".join(f"{key}={as_typed(value)}" for key, value in row.values.items()) for row in rows]
    return [shown(each, 60) or "all runs" for each in values]


def _canvas(compared: Comparison, title: str, panel: tuple[float, float], panels: int = 1) -> tuple[Figure, list[Axes]]:
    """Return a figure without data, and the axes of its panels, of which each has this width and height in inches."""
    counts = sorted({len(row.runs) for row in compared.rows})
    repeats = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else f"{counts[0]}"
    spread = "; error bars and bands: ± standard deviation" if counts[-1] > 1 else ""
    across = min(panels, 3)
    down = math.ceil(panels / across)
    figure = Figure(figsize=(panel[0] * across, panel[1] * down + 0.4), dpi=120, layout="constrained")
    figure.suptitle(shown(title, 90), x=0.01, ha="left", fontsize=11, fontweight="bold")
    axes = [figure.add_subplot(down, across, 1 + number) for number in range(panels)]
    axes[0].set_title(f"Runs per point: {repeats}{spread}", loc="left", fontsize=8, color="#666666")
    for each in axes:
        each.grid(axis="y", color="#dddddd", lw=0.7)
        each.set_axisbelow(True)
        seaborn.despine(ax=each)
    return figure, axes


def _canvas_of_rows(compared: Comparison, title: str, labels: list[str]) -> tuple[Figure, Axes]:
    """Return a figure without data, and its axes, with `labels` at the numbers of rows, the first of them on top."""
    lines = max(label.count("\n") + 1 for label in labels)
    height = 1.24 + 0.16 * lines + (0.2 + 0.16 * lines) * len(labels)
    figure, [axes] = _canvas(compared, title, (8.5, height))
    axes.set_yticks(range(len(labels)), labels, fontsize=9)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    return figure, axes


def _scale_y(axes: Axes, values: Any) -> None:
    if values.min() > 0 and values.max() > 100 * values.min():
        axes.set_yscale("log")


# ---------------------------------------------------------------------------------------------------------------------
# Run times


def _speed_up(compared: Comparison, row: Row) -> float | None:
    """Return how many times as fast the steps are as those of the only row with `parallel=single` and the same keys."""
    single = [each for each in compared.rows if each.runs[0].mode == "single" and each.other_values == row.other_values]
    if len(single) != 1 or STEP_SECONDS not in single[0].measures:
        return None
    return seconds_of(single[0]) / seconds_of(row)


def _bars(title: str, compared: Comparison, rows: Sequence[Row]) -> Figure:
    """Draw a bar per row with the seconds per step, the throughput, and the speed-up over one device."""
    figure, axes = _canvas_of_rows(compared, title, _labels(rows))
    modes = list(dict.fromkeys(row.runs[0].mode for row in rows))
    for at, row in enumerate(rows):
        seconds, speed = row.measures[STEP_SECONDS], _speed_up(compared, row)
        rate = row.measures[RATE].mean if RATE in row.measures else math.nan
        color = COLORS[modes.index(row.runs[0].mode) % len(COLORS)]
        bar = 0.0 if math.isnan(seconds.deviation) else seconds.deviation
        axes.barh(at, seconds.mean, 0.66, xerr=bar or None, color=color, error_kw={"capsize": 4, "lw": 1.2})
        text = f"{rate:{',.0f' if rate >= 100 else '.3g'}} samples/s"
        text += f", {speed:.2f} ×" if speed and row.runs[0].mode != "single" else ""
        axes.annotate(text, (seconds.mean + bar, at), (5, 0), textcoords="offset points", va="center", fontsize=8.5)
    axes.margins(x=0.3)
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
        size, best = min(curve.points, key=lambda point: seconds_of(point[1]))
        star = {"marker": "*", "ms": 16, "ls": "", "color": color, "mec": "white", "zorder": 5}
        axes.plot(size, seconds_of(best), label=f"best: {size}, {seconds_of(best):.3g} s", **star)
        if speed := _speed_up(compared, best):
            single = speed * seconds_of(best)
            axes.axhline(single, color="#777777", ls=":", lw=1.2, label=f"single: {single:.3g} s")
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
    quality, names = shown(compared.title(compared.quality)), list(map(shown, compared.keys))
    # The columns have the names that are drawn. A type checker does not know their types.
    data: Any = DataFrame({quality: [measured[compared.quality] for _, measured in runs]})
    data[_SECONDS] = [measured.get(STEP_SECONDS, math.nan) for _, measured in runs]
    for name, key in zip(names, compared.keys, strict=True):
        values: list[Any] = [run.labels.get(key) for run, _ in runs]
        numeric = all(map(is_number, values))
        ascending = sorted(values, key=lambda value: value if is_number(value) else math.inf)
        texts = [[shown(as_typed(value)) for value in each] for each in (values, ascending)]
        data[name] = [*map(float, values)] if numeric else texts[0]
        if not numeric and any(map(is_number, values)):  # such as 3, 10, null
            data[name] = Categorical(texts[0], [*dict.fromkeys(texts[1])])
    sizes = [data[name].nunique() for name in names]
    drawn: dict[str, Figure] = {}
    if len(names) == 2 and max(sizes) <= _MAX_CELLS and len(compared.rows) >= 0.75 * math.prod(sizes):
        is_best_bright = compared.direction == "max" and compared.quality != STEP_SECONDS
        drawn["heat_map"], [axes] = _canvas(compared, f"{quality} over two keys", (8, 5))
        cells = data.pivot_table(index=names[0], columns=names[1], values=quality, observed=True)
        seaborn.heatmap(cells, cmap="viridis" if is_best_bright else "viridis_r", annot=True, fmt=".4g", ax=axes)
    panels = [(name, quality) for name in names if data[name].dtype.kind == "f" or data[name].nunique() <= _MAX_CELLS]
    if len(names) == 1 and compared.quality != STEP_SECONDS and data[_SECONDS].notna().any():
        panels += [(name, _SECONDS) for name, _ in panels]
    drawn |= {"sweep": _over_keys(compared, data, names, panels[:_MAX_PANELS])} if panels else {}
    return drawn | ({"differences": _differences(compared)} if compared.contrasts else {})


def _front(compared: Comparison) -> Figure:
    """Draw the rows over each pair of metrics, with error bars; of two metrics, a line bounds what the front beats."""
    pairs = [*itertools.combinations(compared.metrics, 2)][:_MAX_PANELS]
    figure, axes = _canvas(compared, f"Front of {', '.join(compared.metrics)}", (7.0, 5.0), len(pairs))
    named, more = compared.front[:_MAX_LINES], compared.front[_MAX_LINES:]
    groups = [(label, color, [row]) for label, color, row in zip(_labels(named), COLORS, named, strict=False)]
    others = [row for row in compared.rows if row not in compared.front]
    groups += [("more on the front", "#777777", more), ("not on the front", "#cccccc", others)]
    for each, (x, y) in zip(axes, pairs, strict=True):
        for label, color, rows in groups:
            if found := [(row.measures[x], row.measures[y]) for row in rows if {x, y} <= row.measures.keys()]:
                (across, width), (up, height) = (zip(*spreads, strict=True) for spreads in zip(*found, strict=True))
                each.errorbar(across, up, height, width, color=color, fmt="o", capsize=3, label=label)
        if len(pairs) == 1:
            ends = sorted((row.measures[x].mean, row.measures[y].mean) for row in compared.front)
            side = "steps-pre" if compared.metrics[x] == "max" else "steps-post"
            each.plot(*zip(*ends, strict=True), drawstyle=side, color="#777777", lw=1, zorder=1)
        better = {tag: "larger" if goal == "max" else "smaller" for tag, goal in compared.metrics.items()}
        each.set_xlabel(shown(f"{compared.title(x)} ({better[x]} is better)", 60))
        each.set_ylabel(shown(f"{compared.title(y)} ({better[y]} is better)", 60))
    figure.legend(*axes[0].get_legend_handles_labels(), frameon=False, fontsize=9, loc="outside lower left")
    return figure


def _differences(compared: Comparison) -> Figure:
    """Draw the difference of each row to the best one with its 95 % confidence interval."""
    found = [(compared.rows[index], each) for index, each in compared.contrasts.items()][:_MAX_BARS]
    title = f"Difference of the {compared.title(compared.quality)} to the best row"
    figure, axes = _canvas_of_rows(compared, title, _labels([row for row, _ in found]))
    axes.set_title("95 % confidence intervals; gray: cannot be told from it", loc="left", fontsize=8, color="#666666")
    for at, (_, each) in enumerate(found):
        width = 0.0 if math.isnan(each.low) else each.high - each.difference
        color = COLORS[0] if each.differs else "#999999"
        axes.errorbar(each.difference, at, xerr=width, color=color, marker="o", ms=5, lw=1.6, capsize=4)
    assert compared.reference is not None
    axes.axvline(0, color=COLORS[1], ls=":", lw=1.2, label=f"the best: {_labels([compared.reference])[0]}")
    axes.set_xlabel(shown(compared.title(compared.quality)))
    figure.legend(frameon=False, fontsize=9, loc="outside lower left")
    return figure


def _over_keys(compared: Comparison, data: Any, names: list[str], panels: list[tuple[str, str]]) -> Figure:
    """Draw a panel for each pair of a key and a measure: lines with bands over numbers, bars over options."""
    title = f"{panels[0][1]} over {', '.join(dict.fromkeys(name for name, _ in panels))}"
    figure, axes = _canvas(compared, title, (5.0, 3.8), len(panels))
    for each, (name, column) in zip(axes, panels, strict=True):
        look: dict[str, Any] = {"data": data, "x": name, "y": column, "ax": each, "color": COLORS[0]}
        other = next((key for key in names if key != name), name)
        if len(names) == 2 and data[other].nunique() <= _MAX_LINES:
            del look["color"]
            values = data[other].unique()  # in the order of the runs
            numeric = values.dtype.kind == "f"
            texts = {value: f"{value:.6g}" if numeric else value for value in (sorted(values) if numeric else values)}
            look |= {"hue": data[other].map(texts), "hue_order": list(texts.values()), "palette": COLORS[: len(texts)]}
        if data[name].dtype.kind != "f":
            seaborn.barplot(**look, errorbar="sd", saturation=1, capsize=0.2)
        else:
            if len(names) > 2 and not data[name].duplicated().any():  # a line through single values would be noise
                seaborn.scatterplot(**look)
            else:
                seaborn.lineplot(**look, errorbar="sd", marker="o")
            ticks = sorted(data[name].unique())
            if 0 < 10 * ticks[0] <= ticks[-1]:
                each.set_xscale("log")
            if len(ticks) <= _MAX_TICKS:
                each.set_xticks(ticks, [f"{value:.6g}" for value in ticks])
                each.minorticks_off()
        if column == _SECONDS:
            each.set_ylim(0)  # so that noise does not look like a difference
        else:
            _scale_y(each, data[column])
        each.margins(y=0.1)
    return figure


def _curves(compared: Comparison) -> dict[str, Figure]:
    """Return the figure `curves` of the best rows, with a metric that a run logged at 2 or, better, more steps.

    If a step of some of them takes more operations, as of a larger network, `compute` shows the metric over these.
    """
    wanted = [compared.metric, f"train/{compared.metric.rpartition('/')[2]}", "train/loss"]
    rows = compared.rows[:_MAX_LINES]
    runs = [(number, run) for number, row in enumerate(rows) for run in row.runs]
    read = [(number, _tflop(run), EventReader(run.directory, wanted).read()) for number, run in runs]
    longest = {tag: max(len(curves.get(tag, ())) for *_, curves in read) for tag in wanted}
    tag = next((tag for least in (3, 2) for tag in wanted if longest[tag] >= least), None)
    if tag is None:
        return {}
    y, found = shown(tag), [(number, tflop, curves[tag]) for number, tflop, curves in read if tag in curves]
    tables = [
        DataFrame({_STEPS: curve.keys(), y: curve.values()}).assign(row=number, tflop=tflop)
        for number, tflop, curve in found
    ]
    data: Any = concat(tables)
    # The operations of a step are found from its time, so that those of equal networks differ by a rounding.
    data[_COMPUTE] = data[_STEPS] * data.groupby("row").tflop.transform("median")
    known = data.tflop.min() > 0 and data.tflop.max() > 1.05 * data.tflop.min()
    over = {"curves": _STEPS, "compute": _COMPUTE} if known else {"curves": _STEPS}
    labels = _labels(rows)
    lines = sum(label.count("\n") + 1 for label in labels)
    height = max(4.4, 1.5 + 0.16 * lines + 0.1 * len(rows))
    drawn: dict[str, Figure] = {}
    for name, x in over.items():
        drawn[name], [axes] = _canvas(compared, f"{tag} over {x}", (8.6, height))
        for number, (label, color) in enumerate(zip(labels, COLORS, strict=False)):
            if (curve := data[data.row == number]).size:
                seaborn.lineplot(curve, x=x, y=y, ax=axes, errorbar="sd", color=color, lw=1.6, label=label)
        _scale_y(axes, data[y])
        axes.legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(1, 1))
    return drawn


def _tflop(run: MeasuredRun) -> float:
    """Return the 10¹² floating-point operations of a training step; 0 if they are not known."""
    return run.metrics.get("time/tflops", 0.0) * run.metrics.get("time/step_seconds", 0.0)
