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
from pandas import DataFrame, Series, concat

from runner.analysis.comparison import BEST, LAST, RATE, STEP_SECONDS, Comparison, Row
from runner.analysis.output import one_line
from runner.analysis.saved_runs import is_number
from runner.analysis.split_curves import SplitCurve, fastest_pipelines, is_pipeline, split_curves
from runner.config.errors import escaped
from runner.config.overrides import as_typed
from runner.system.utf8 import printable
from runner.tracking.event_reader import scalars

NAMES = ("modes", "modes_and_pipeline", "split_size", "sweep", "heat_map", "curves")
"""The names of all figures that `pictures` may return."""

COLORS = ("#2f6f9f", "#c8553d", "#5b8c5a", "#8e6c8a", "#b8860b", "#4c4c4c")
_GRAY = "#bbbbbb"
_MAX_BARS, _MAX_LINES, _MAX_NAMES, _MAX_PANELS, _MAX_CELLS, _MAX_TICKS = 24, 6, 16, 6, 16, 10
_MAX_CURVES = 120
"""The maximum number of runs whose event files are read. Reading one run takes a few milliseconds."""

_QUALITY, _SECONDS, _ROW, _LINE = "the quality", "seconds per step", "the row", "the line"
"""Columns of the tables that are drawn, besides those of the config keys, which contain no spaces."""


def pictures(compared: Comparison) -> dict[str, Figure]:
    """Return the figures that suit the compared runs by name; an empty dict if there is nothing to compare.

    Runs of several parallel modes have the run time of each mode, with and without a pipeline, and of the pipeline for
    each `split_size`. Other runs have the metric over one key, over two keys, or over each of several keys. If there is
    no figure over `split_size`, there are learning curves.
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


def _of_sweep(compared: Comparison) -> dict[str, Figure]:
    """Return the figures `sweep` and `heat_map`, as far as they suit the swept keys."""
    data, keys = _frame(compared), compared.keys
    if data.empty:
        return {}
    sizes = {key: data[key].nunique() for key in keys}
    filled = len(compared.rows) / math.prod(sizes.values())
    drawn: dict[str, Figure] = {}
    if len(keys) == 2 and filled >= 0.75 and max(sizes.values()) <= _MAX_CELLS:
        drawn["heat_map"] = _heat_map(compared, data)
    for key in sorted(keys, key=lambda key: (not _is_numeric(data[key]) or sizes[key] < 3, -sizes[key])):
        other = next((name for name in keys if name != key), None)
        lines = sizes[other] if other else 1
        readable = _is_numeric(data[key]) or (sizes[key] * lines <= _MAX_NAMES and data[key].str.len().max() <= 20)
        if readable and lines <= _MAX_LINES and (len(keys) == 1 or (len(keys) == 2 and filled >= 0.5)):
            return drawn | {"sweep": _over_one_key(compared, data, key, other)}
    panels = [key for key in keys if _varies_by_itself(data[key])][:_MAX_PANELS]
    return drawn | ({"sweep": _over_each_key(compared, data, panels)} if panels else {})


def _varies_by_itself(values: Any) -> bool:
    """Return whether the values of a key vary enough to show the effect of this key alone."""
    counts = values.value_counts()
    if _is_numeric(values) and len(counts) > 2:
        return counts.max() <= counts.sum() / 2
    return 2 <= len(counts) <= _MAX_NAMES and sum(counts > 1) >= 2


# ---------------------------------------------------------------------------------------------------------------------
# Data and texts


def _frame(compared: Comparison) -> Any:  # a DataFrame, whose column may be anything for a type checker
    """Return a table with a line for each run that has a quality (see `Comparison.quality`), in the order of the jobs.

    Its columns are the quality, the seconds per step, the number of the row, and the keys.
    """
    runs = [(number, run, compared.measured(run)) for number, row in enumerate(compared.rows) for run in row.runs]
    runs = sorted((each for each in runs if compared.quality in each[2]), key=lambda each: each[1].directory)
    columns = {
        _QUALITY: [measured[compared.quality] for *_, measured in runs],
        _SECONDS: [measured.get(STEP_SECONDS, math.nan) for *_, measured in runs],
        _ROW: [number for number, *_ in runs],
    }
    return DataFrame(columns | {key: _drawable([run.labels.get(key) for _, run, _ in runs]) for key in compared.keys})


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


def distinct(texts: Iterable[str]) -> list[str]:
    """Make texts distinct by appending a number to each repetition of a text, such as `text (2)`."""
    counts, found = Counter[str](), []
    for text in texts:
        counts[text] += 1
        found.append(text if counts[text] == 1 else f"{text} ({counts[text]})")
    return found


def shown(value: object, longest: int = 26) -> str:
    """Return a config value as the user types it, shortened to `longest` characters to fit into a figure.

    Dollar signs are escaped, because matplotlib would read them as the beginning of a formula.
    """
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)
    text = escaped(printable(" ".join(as_typed(value)[:400].split())))
    if len(text) > longest:  # the end of a path says more than its beginning
        text = f"…{text[-longest + 1 :]}" if "/" in text else f"{text[: longest - 1]}…"
    return text.replace("$", r"\$")


def _labels(compared: Comparison, rows: Sequence[Row], without: str = "") -> list[str]:
    """Return a label for each of `rows`: the values of the keys, but those of the key `without`.

    If there are more than three keys, only the values that differ from the most common value of their key.
    """
    keys = [key for key in compared.keys if key != without]
    common = {key: Counter(repr(row.values.get(key)) for row in rows).most_common(1)[0] for key in keys}
    usual = {key: value for key, (value, count) in common.items() if len(keys) > 3 and 2 * count > len(rows)}
    lasts = Counter(key.rpartition(".")[2] for key in keys)
    names = {key: shown(last if lasts[last := key.rpartition(".")[2]] == 1 else key, 40) for key in keys}
    texts = []
    for row in rows:
        values = {key: row.values[key] for key in keys if key in row.values}
        differing = [key for key, value in values.items() if usual.get(key) != repr(value)]
        parts = [f"{names[key]}={shown(values[key], 20)}" for key in differing]
        lines = [", ".join(parts[i : i + 4]) for i in range(0, len(parts), 4)]
        texts.append("\n".join(lines) or ("" if without else "all as in most runs"))
    return distinct(texts) if not without else texts


def _caption(compared: Comparison) -> str:
    counts = sorted({len(row.runs) for row in compared.rows})
    repeats = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else f"{counts[0]}"
    spread = "; error bars and bands: ± standard deviation" if counts[-1] > 1 else ""
    machines = one_line("; ".join(sorted({run.machine for row in compared.rows for run in row.runs})))
    return f"{machines if len(machines) <= 60 else f'{machines[:59]}…'}. Runs per point: {repeats}{spread}"


# ---------------------------------------------------------------------------------------------------------------------
# Axes


def canvas(
    title: str, caption: str, panel: tuple[float, float], panels: int = 1, columns: int = 3
) -> tuple[Figure, list[Axes]]:
    """Return a figure without data, and the axes of each of its panels.

    Args:
        title: the title of the figure, as plain text.
        caption: a line below the title, as plain text without control characters.
        panel: width and height of each panel in inches.
        panels: number of panels.
        columns: maximum number of panels in a row.
    """
    across = min(panels, columns)
    down = math.ceil(panels / across)
    figure = Figure(figsize=(panel[0] * across, panel[1] * down + 0.4), dpi=120, layout="constrained")
    figure.suptitle(shown(title, 90), x=0.01, ha="left", fontsize=11, fontweight="bold")
    axes = [figure.add_subplot(down, across, 1 + number) for number in range(panels)]
    wrapped = textwrap.fill(caption, int(15 * (panel[0] * across - 0.8))).replace("$", r"\$")
    axes[0].set_title(wrapped, loc="left", fontsize=8, color="#666666")
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


def _label(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(shown(x, 40))
    axes.set_ylabel(shown(y, 40))


def _legend_beside(figure: Figure, axes: Axes) -> None:
    """Show the legend of `axes` to the right of all panels, if it has more than one entry."""
    handles, labels = axes.get_legend_handles_labels()
    for each in figure.axes:
        if legend := each.get_legend():
            legend.remove()
    if len(labels) > 1:
        figure.legend(handles, labels, loc="outside right center", frameon=False, fontsize=9)


def is_geometric(values: Iterable[float]) -> bool:
    """Return whether neighboring values have similar ratios rather than similar differences, as in 1, 3, 10.

    Zeros are ignored, as in `weight_decay=0,1e-4,1e-3`.
    """
    ordered = sorted({value for value in values if value != 0})
    if len(ordered) < 2 or ordered[0] < 0 or ordered[-1] / ordered[0] <= 3:
        return False
    ratios = [math.log(after / before) for before, after in itertools.pairwise(ordered)]
    gaps = [after - before for before, after in itertools.pairwise(ordered)]
    if len(gaps) == 1:
        return ordered[1] / ordered[0] >= 10
    return max(ratios) / min(ratios) < max(gaps) / min(gaps) if min(ratios) > 0 else False


def _scale_x(axes: Axes, values: Iterable[float]) -> None:
    """Choose a linear or logarithmic x-axis for `values`, with a tick at each value if there is room for all ticks."""
    ordered = sorted(set(values))
    if is_geometric(ordered):
        low = min(value for value in ordered if value > 0)
        axes.set_xscale("symlog", linthresh=low, linscale=0.5) if ordered[0] == 0 else axes.set_xscale("log")
    if len(ordered) <= _MAX_TICKS:
        at = axes.transScale.transform([(value, 1.0) for value in ordered])[:, 0]
        if all(after - before >= 0.07 * (at[-1] - at[0]) for before, after in itertools.pairwise(at)):
            axes.set_xticks(ordered, [f"{value:.6g}" for value in ordered])
            axes.minorticks_off()


def _scale_y(axes: Axes, values: Any) -> None:
    """Choose a logarithmic y-axis if all `values` are positive and span a factor of over 100."""
    if values.min() > 0 and values.max() > 100 * values.min():
        axes.set_yscale("log")


def _turn_labels(axes: Axes, names: Sequence[str]) -> None:
    if sum(map(len, names)) > 30:
        axes.tick_params(axis="x", labelrotation=30)
        for label in axes.get_xticklabels():
            label.set_horizontalalignment("right")


def _palette(values: Sequence[Any]) -> list[Any]:
    """Return a color for each value: shades from dark to light for three or more numbers, otherwise distinct colors."""
    if len(values) > 2 and all(map(is_number, values)):
        return seaborn.color_palette("viridis", len(values))
    return [COLORS[i % len(COLORS)] for i in range(len(values))]


# ---------------------------------------------------------------------------------------------------------------------
# Run times


def _bars(title: str, compared: Comparison, rows: Sequence[Row]) -> Figure:
    """Draw a bar per row with the seconds per step, the throughput, and the speed-up over one device."""
    figure, [axes] = canvas(title, _caption(compared), (8.5, 1.4 + 0.36 * len(rows)))
    modes = list(dict.fromkeys(row.runs[0].mode for row in rows))
    others = _labels(compared, rows, without="parallel")
    names = distinct(
        ", ".join(filter(None, (shown(row.runs[0].mode), other))) for row, other in zip(rows, others, strict=True)
    )
    for at, row in enumerate(rows):
        seconds, speed = row.measures[STEP_SECONDS], compared.speed_up(row)
        rate = row.measures[RATE].mean if RATE in row.measures else math.nan
        color = COLORS[modes.index(row.runs[0].mode) % len(COLORS)]
        bar = 0.0 if math.isnan(seconds.deviation) else seconds.deviation
        axes.barh(at, seconds.mean, 0.66, xerr=bar or None, color=color, error_kw={"capsize": 4, "lw": 1.2})
        text = f"{rate:{',.0f' if rate >= 100 else '.3g'}} samples/s"
        text += f", {speed:.2f} ×" if speed and row.runs[0].mode != "single" else ""
        axes.annotate(text, (seconds.mean + bar, at), (5, 0), textcoords="offset points", va="center", fontsize=8.5)
    axes.set_yticks(range(len(rows)), names, fontsize=9)
    axes.invert_yaxis()
    axes.margins(x=0.3)
    axes.grid(visible=False, axis="y")
    _label(axes, _SECONDS, "")
    return figure


def _over_split_size(compared: Comparison, curves: Sequence[SplitCurve]) -> Figure:
    """Draw the measured times with error bars, the lower bound by GPipe's bubble, and a star at the best point."""
    figure, [axes] = canvas("Run time of the pipeline over split_size", _caption(compared), (8, 4.0))
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
    _label(axes, "split_size: samples in a micro-batch", _SECONDS)
    axes.legend(frameon=False, fontsize=9)
    return figure


# ---------------------------------------------------------------------------------------------------------------------
# Over the swept keys


def _over_one_key(compared: Comparison, data: Any, key: str, other: str | None) -> Figure:
    """Draw the metric and the seconds per step over `key`: lines with bands over numbers, bars over options.

    The key `other`, if there are two, is shown by colors.
    """
    title, panels = compared.title(compared.quality), {_QUALITY: compared.title(compared.quality)}
    panels |= {_SECONDS: _SECONDS} if compared.quality != STEP_SECONDS and data[_SECONDS].notna().any() else {}
    values, groups = _in_order(data[key]), _in_order(data[other]) if other else [""]
    names = {group: f"{shown(other, 40)}={shown(group)}" if other else "" for group in groups}
    data = data.assign(**{_LINE: [names[group] for group in data[other]] if other else ""})
    width = 5.4 if _is_numeric(data[key]) else max(4.2, 1.0 + 0.55 * len(values) * len(groups))
    figure, axes = canvas(f"{title} over {key}", _caption(compared), (width, 4.0), len(panels))
    look: dict[str, Any] = {"data": data, "x": key, "hue": _LINE, "hue_order": list(names.values()), "errorbar": "sd"}
    for each, (column, text) in zip(axes, panels.items(), strict=True):
        if _is_numeric(data[key]):
            seaborn.lineplot(**look, y=column, palette=_palette(groups), marker="o", ax=each)
            _scale_x(each, values)
            if column == _QUALITY:
                _scale_y(each, data[_QUALITY])
        else:
            seaborn.barplot(
                **look, y=column, order=values, palette=_palette(groups), saturation=1, capsize=0.2, ax=each
            )
            for bars in each.containers:
                each.bar_label(bars, fmt="%.4g", fontsize=8, label_type="center", color="white")  # pyright: ignore[reportArgumentType]
            _turn_labels(each, values)
        if column == _SECONDS:
            each.set_ylim(0)  # so that noise does not look like a difference
        each.margins(y=0.1)
        _label(each, key, text)
    _legend_beside(figure, axes[0])
    return figure


def _heat_map(compared: Comparison, data: Any) -> Figure:
    """Draw the mean of the metric for each pair of values. Better numbers have brighter cells."""
    title = compared.title(compared.quality)
    down, across = sorted(compared.keys, key=lambda key: data[key].nunique())
    rows, columns = _in_order(data[down]), _in_order(data[across])
    cells = data.pivot_table(index=down, columns=across, values=_QUALITY).reindex(index=rows, columns=columns)
    size = max(5.5, min(12.0, 3.0 + 0.75 * len(columns))), max(3.0, min(9.0, 1.6 + 0.55 * len(rows)))
    figure, [axes] = canvas(f"{title} over two keys", _caption(compared), size)
    is_best_bright = compared.direction == "max" and compared.quality in (BEST, LAST)
    seaborn.heatmap(
        cells,
        cmap="viridis" if is_best_bright else "viridis_r",
        annot=len(columns) <= 14,
        fmt=".4g",
        annot_kws={"fontsize": 8 if max(len(rows), len(columns)) <= 8 else 6},
        cbar_kws={"label": shown(title, 40), "shrink": 0.9},
        xticklabels=[shown(value, 16) for value in columns],  # pyright: ignore[reportArgumentType]
        yticklabels=[shown(value, 16) for value in rows],  # pyright: ignore[reportArgumentType]
        ax=axes,
    )
    if _is_numeric(data[down]):
        axes.invert_yaxis()
    axes.tick_params(length=0, labelrotation=0)
    _label(axes, across, down)
    return figure


def _over_each_key(compared: Comparison, data: Any, keys: Sequence[str]) -> Figure:
    """Draw a panel for each of `keys`, with the metric of all runs, whatever their values of the other keys."""
    title = compared.title(compared.quality)
    figure, panels = canvas(
        f"{title} over each key, for all values of the others",
        _caption(compared),
        (4.2, 3.4),
        len(keys),
        columns=2 if len(keys) == 4 else 3,
    )
    for axes, key in zip(panels, keys, strict=True):
        values = _in_order(data[key])
        look: dict[str, Any] = {"data": data, "x": key, "y": _QUALITY, "ax": axes}
        if _is_numeric(data[key]):
            seaborn.scatterplot(**look, color=_GRAY)
            if data[key].duplicated().any() or len(values) <= _MAX_TICKS:  # a line through single values is noise
                seaborn.lineplot(**look, errorbar="sd", marker="o", color=COLORS[0])
            _scale_x(axes, values)
        else:
            seaborn.stripplot(**look, order=values, color=_GRAY, jitter=False, size=4, zorder=1)
            mean = {"errorbar": "sd", "linestyle": "none", "markersize": 5, "err_kws": {"linewidth": 1.4}}
            seaborn.pointplot(**look, **mean, order=values, capsize=0.1, color=COLORS[0])
            _turn_labels(axes, values)
        _scale_y(axes, data[_QUALITY])
        _label(axes, key, title)
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
    x, y = "optimizer steps", _QUALITY
    found = [(number, curves[tag]) for number, curves in read if tag in curves]
    data: Any = concat(DataFrame({x: curve.keys(), y: curve.values(), _ROW: number}) for number, curve in found)
    colored, values = list(enumerate(rows))[:_MAX_LINES], []
    if len(compared.keys) == 1 and len(rows) <= _MAX_LINES:
        values = _drawable([row.values.get(compared.keys[0]) for row in rows])
        colored.sort(key=lambda each: _in_order(Series(values)).index(values[each[0]]))
    labels = _labels(compared, [row for _, row in colored]) if compared.keys else [f"{len(rows[0].runs)} runs"]
    longest = max(len(line) for label in labels for line in label.split("\n"))
    figure, [axes] = canvas(f"{tag} over steps", _caption(compared), (6.6 + 0.08 * longest * (len(rows) > 1), 4.4))
    others = data[~data[_ROW].isin([number for number, _ in colored])]
    if len(others):
        means: Any = others.groupby([_ROW, x], as_index=False)[y].mean()
        seaborn.lineplot(means, x=x, y=y, units=_ROW, estimator=None, color="#cccccc", lw=0.8, ax=axes)
        axes.plot([], [], color="#cccccc", lw=0.8, label=f"{others[_ROW].nunique()} others")
    for (number, _), label, color in zip(colored, labels, _palette(values or labels), strict=True):
        if (curve := data[data[_ROW] == number]).size:
            seaborn.lineplot(curve, x=x, y=y, errorbar="sd", color=color, lw=1.6, label=label, ax=axes)
    _scale_y(axes, data[y])
    _label(axes, x, tag)
    _legend_beside(figure, axes)
    return {"curves": figure}
