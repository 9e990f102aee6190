"""Functions that draw the figures of any sweep: its metric over the swept keys, a ranking, and learning curves."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import matplotlib
from matplotlib import colors
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from runner.analysis.plot_curves import LearningCurve, learning_curves
from runner.analysis.plot_runs import Point, Study
from runner.analysis.plot_tables import format_value
from runner.sweep.metric_direction import direction
from runner.tracking import charts
from runner.tracking.charts import COLORS, is_number, shown
from runner.tracking.mean_std import Spread

_SECONDS = "seconds per step"
_MOST_LINES, _MOST_NAMES, _MOST_ROWS, _MOST_PANELS, _MOST_CELLS = 6, 8, 20, 6, 16


def figures(study: Study, caption: str) -> dict[str, Figure]:
    """Return the figures of `study` by name: `sweep`, `ranking` and `heat_map`, as far as they suit the study.

    Args:
        study: a study with several points.
        caption: a line below the title of each figure.
    """
    keys = study.keys
    if len(keys) <= 2 and _is_grid(study) and (lines := _line_keys(study)) is not None:
        drawn = {"sweep": _over_one_key(study, caption, *lines)}
    elif len(keys) > 2 or not _is_grid(study) or len(keys) == 1:
        drawn = {"ranking": _ranking(study, caption)}
        if panels := [key for key in keys if _varies_by_itself(study, key)][:_MOST_PANELS]:
            drawn["sweep"] = _over_each_key(study, caption, panels)
    else:
        drawn = {}
    if len(keys) == 2 and _fills_heat_map(study):
        drawn["heat_map"] = _heat_map(study, caption)
    return drawn


def curves(study: Study, caption: str) -> dict[str, Figure]:
    """Return a dict with the key `curves`: a figure of the learning curves of `study`.

    The dict is empty if there are no learning curves.
    """
    tag, found = learning_curves(study)
    return {"curves": _curves(study, caption, tag, found)} if found else {}


# ---------------------------------------------------------------------------------------------------------------------
# Measurements


def _value(point: Point, key: str) -> Any:
    """Return the value of `key` at `point`: numbers unchanged, and all other values as text."""
    value = point.values.get(key)
    return value if is_number(value) else format_value(value)


def _values(study: Study, key: str) -> list[Any]:
    """Return the distinct values of `key`: sorted if all are numbers, otherwise in the order of the points."""
    values = list(dict.fromkeys(_value(point, key) for point in study.points))
    return sorted(values) if all(map(is_number, values)) else values


def _quality(study: Study) -> tuple[str, dict[Point, Spread]]:
    """Return the name of the study's metric, and a dict with the spread of the metric at each point that has it.

    If no point has the metric, the seconds per step take its place.
    """
    finals = {point: point.final for point in study.points}
    measured = {point: final for point, final in finals.items() if final is not None}
    return (study.metric, measured) if measured else (_SECONDS, {point: point.seconds for point in study.points})


def _larger_is_better(study: Study, metric: str) -> bool:
    results = {run.directory: run.result for point in study.points for run in point.runs}
    return metric != _SECONDS and direction(metric, results) == "max"


def _best_first(study: Study) -> list[Point]:
    """Return the points that have the metric, the best first."""
    metric, quality = _quality(study)
    return sorted(quality, key=lambda point: quality[point].mean, reverse=_larger_is_better(study, metric))


def _runs(metric: str, point: Point) -> list[float]:
    """Return the values of `metric` in the runs of `point`. Runs without this metric are left out.

    Args:
        metric: a name that `_quality` returns.
        point: the point whose runs are read.
    """
    if metric == _SECONDS:
        return [run.seconds for run in point.runs]
    metrics = [run.result.get("metrics", {}) for run in point.runs]
    return [values[metric] for values in metrics if metric in values]


# ---------------------------------------------------------------------------------------------------------------------
# Which figures fit


def _is_grid(study: Study) -> bool:
    """Return whether the points cover at least half of all combinations of the keys' values, as in a grid search."""
    return len(study.points) >= 0.5 * math.prod(len(_values(study, key)) for key in study.keys)


def _fills_heat_map(study: Study) -> bool:
    """Return whether a heat map of the study would have few empty cells, and few enough cells for readable labels."""
    sizes = [len(_values(study, key)) for key in study.keys]
    return len(study.points) >= 0.75 * math.prod(sizes) and max(sizes) <= _MOST_CELLS


def _line_keys(study: Study) -> tuple[str, str | None] | None:
    """Return the key of the x-axis and the key that distinguishes the lines; None if no choice of keys is readable.

    The second key is None if the study has only one key. A choice is readable if there are not too many lines, and the
    values on the x-axis are numbers, or names that are few and short.
    """
    sizes = {key: len(_values(study, key)) for key in study.keys}
    numbers = {key for key in study.keys if all(map(is_number, _values(study, key)))}
    for key in sorted(study.keys, key=lambda key: (key not in numbers or sizes[key] < 3, -sizes[key])):
        other = next((name for name in study.keys if name != key), None)
        fits = key in numbers or sizes[key] * sizes.get(other or "", 1) <= 2 * _MOST_NAMES
        short = key in numbers or max(len(shown(value)) for value in _values(study, key)) <= 20
        if (other is None or sizes[other] <= _MOST_LINES) and fits and short:
            return key, other
    return None


def _varies_by_itself(study: Study, key: str) -> bool:
    """Return whether the values of `key` vary enough over the points to show the effect of this key alone.

    Only the points that have the key are considered. Three or more different values, all of them numbers, vary enough
    if none of them occurs at more than half of the points. Other values vary enough if there are 2 to 16 different
    values, of which at least two occur at several points.
    """
    counts = Counter(_value(point, key) for point in study.points if key in point.values)
    if len(counts) > 2 and all(map(is_number, counts)):
        return max(counts.values()) <= sum(counts.values()) / 2
    return 2 <= len(counts) <= 2 * _MOST_NAMES and sum(count > 1 for count in counts.values()) >= 2


def _short(key: str, study: Study) -> str:
    """Return the last part of `key`, such as `lr`, if it is unambiguous among the study's keys; otherwise `key`."""
    last = key.rpartition(".")[2]
    return last if [name.rpartition(".")[2] for name in study.keys].count(last) == 1 else key


def label(point: Point, study: Study, without: str = "") -> str:
    """Return a label for a point, which consists of the values of the swept keys.

    If there are more than three keys and the points are not a grid, the label contains only the values that differ from
    the most common value of their key.

    Args:
        point: the point.
        study: the study that contains the point.
        without: a key to leave out; empty to leave out none.
    """
    usual: dict[str, Any] = {}
    if len(study.keys) > 3 and not _is_grid(study):
        usual = {key: Counter(_value(p, key) for p in study.points).most_common(1)[0][0] for key in study.keys}
    values = {key: _value(point, key) for key in study.keys if key in point.values and key != without}
    differing = {key: value for key, value in values.items() if key not in usual or value != usual[key]}
    parts = [f"{shown(_short(key, study), 40)}={shown(value, 20)}" for key, value in differing.items()]
    lines = [", ".join(parts[i : i + 4]) for i in range(0, len(parts), 4)]
    return "\n".join(lines) or ("" if without else "all as in most runs")


# ---------------------------------------------------------------------------------------------------------------------
# Over the swept keys


def _over_one_key(study: Study, caption: str, key: str, other: str | None) -> Figure:
    """Draw the metric and the step time over `key`: lines with bands if its values are numbers, otherwise bars.

    Args:
        study: the study.
        caption: a line below the title.
        key: the key on the x-axis.
        other: the key whose values are shown as separate lines, or as bars of different colors; None if `key` is the
            only key.
    """
    metric, quality = _quality(study)
    panels = {metric: quality} | {_SECONDS: {point: point.seconds for point in study.points}}
    values, groups = _values(study, key), _values(study, other) if other is not None else [None]
    texts = charts.distinct(f"{shown(other, 40)}={shown(group)}" if other is not None else "" for group in groups)
    names = charts.distinct(map(shown, values))
    is_line = all(map(is_number, values))
    width = 5.4 if is_line else max(4.2, 1.0 + 0.55 * len(values) * len(groups))
    title = f"{metric} over {key}" if metric != _SECONDS else f"Over {key}"
    figure, axes = charts.canvas(title, caption, (width, 4.0), len(panels))
    palette = _sequence(groups)
    for each, (name, spreads) in zip(axes, panels.items(), strict=True):
        lines: dict[str, list[tuple[Any, Spread]]] = {}
        for group, text in zip(groups, texts, strict=True):
            found = [(_value(p, key), s) for p, s in spreads.items() if other is None or _value(p, other) == group]
            if found:
                lines[text] = sorted(found, key=lambda pair: values.index(pair[0]))
        if is_line:
            for text, pairs in lines.items():
                charts.line(
                    each, [x for x, _ in pairs], [s for _, s in pairs], palette[texts.index(text)], text or None
                )
            charts.scale_x(each, values)
        else:
            bars = {text: [(names[values.index(x)], s) for x, s in pairs] for text, pairs in lines.items()}
            charts.bars(each, bars)
        if name != _SECONDS and is_line:
            charts.scale_y(each, [spread.mean for spread in spreads.values()])
        if name == _SECONDS:
            # From 0, so that noise does not look like a difference.
            each.set_ylim(0, 1.15 * max(spread.mean + spread.bar for spread in spreads.values()))
        each.set_xlabel(shown(key, 40))
        each.set_ylabel(shown(name, 40))
    if other is not None:
        charts.legend_beside(figure, axes[0])
    return figure


def _sequence(values: list[Any]) -> list[str]:
    """Return a color for each value: shades from dark to light for three or more numbers, otherwise distinct colors."""
    if len(values) < 3 or not all(map(is_number, values)):
        return [COLORS[i % len(COLORS)] for i in range(len(values))]
    shades = matplotlib.colormaps["viridis"]
    return [colors.to_hex(shades(0.9 * i / (len(values) - 1))) for i in range(len(values))]


def _heat_map(study: Study, caption: str) -> Figure:
    metric, quality = _quality(study)
    down, across = sorted(study.keys, key=lambda key: len(_values(study, key)))
    columns, rows = len(_values(study, across)), len(_values(study, down))
    size = min(12.0, 3.0 + 0.75 * columns), min(9.0, 1.6 + 0.55 * rows)
    figure, (axes,) = charts.canvas(f"{metric} over two keys", caption, (max(5.5, size[0]), max(3.0, size[1])))
    cells = {(_value(point, across), _value(point, down)): spread.mean for point, spread in quality.items()}
    charts.heat_map(figure, axes, cells, shown(metric, 40), _larger_is_better(study, metric))
    axes.set_xlabel(shown(across, 40))
    axes.set_ylabel(shown(down, 40))
    return figure


def _ranking(study: Study, caption: str) -> Figure:
    """Draw one row for each of the best settings, with the best setting at the top."""
    metric, quality = _quality(study)
    points = _best_first(study)[:_MOST_ROWS]
    labels = [label(point, study) for point in points]
    height = sum(0.16 + 0.14 * (1 + text.count("\n")) for text in labels) + 0.9
    count = f"The best {len(points)} of {len(quality)} settings" if len(points) < len(quality) else "All settings"
    figure, (axes,) = charts.canvas(f"{count} by {metric}", caption, (8.5, height))
    charts.ranking(axes, [(text, quality[p], _runs(metric, p)) for text, p in zip(labels, points, strict=True)])
    axes.tick_params(axis="y", labelsize=8)
    axes.set_xlabel(shown(metric, 40))
    return figure


def _over_each_key(study: Study, caption: str, keys: list[str]) -> Figure:
    """Draw a panel for each of `keys`, with the metric of all runs over the values of this key.

    All runs that have the key are in its panel, whatever their values of the other keys.
    """
    metric, quality = _quality(study)
    across = 2 if len(keys) == 4 else 3
    title = f"{metric} over each key, for all values of the others"
    figure, panels = charts.canvas(title, caption, (4.2, 3.4), len(keys), across)
    for axes, key in zip(panels, keys, strict=True):
        order = _values(study, key)
        points = sorted((p for p in quality if key in p.values), key=lambda p: order.index(_value(p, key)))
        charts.over_values(axes, [(_value(point, key), number) for point in points for number in _runs(metric, point)])
        charts.scale_y(axes, [spread.mean for spread in quality.values()])
        axes.set_xlabel(shown(key, 40))
        axes.set_ylabel(shown(metric, 40))
    return figure


# ---------------------------------------------------------------------------------------------------------------------
# Learning curves


def _curves(study: Study, caption: str, tag: str, found: list[LearningCurve]) -> Figure:
    """Draw the learning curves: the curves of the best settings in color, and the other curves in gray."""
    ranks = {point: rank for rank, point in enumerate(_best_first(study))}
    few = len(found) <= _MOST_LINES
    colored = found if few else sorted(found, key=lambda curve: ranks.get(curve.point, len(ranks)))[:_MOST_LINES]
    if few and len(study.keys) == 1:
        colored = sorted(
            found, key=lambda curve: _values(study, study.keys[0]).index(_value(curve.point, study.keys[0]))
        )
    ordered = few and len(study.keys) == 1
    names = [label(curve.point, study) if study.keys else f"{len(curve.point.runs)} runs" for curve in colored]
    longest = max(len(line) for name in names for line in name.split("\n"))
    title, width = f"{tag} over steps", 6.6 + (0.08 * longest if len(found) > 1 else 0)
    figure, (axes,) = charts.canvas(title, caption, (width, 4.4))
    palette = _sequence([_value(curve.point, study.keys[0]) if ordered else "" for curve in colored])
    for curve in found:
        if all(curve is not each for each in colored):
            axes.plot(curve.steps, [s.mean for s in curve.spreads], color="#cccccc", lw=0.8, zorder=1)
    for curve, color, name in zip(colored, palette, names, strict=True):
        _curve(axes, curve, color, name)
    if len(colored) < len(found):
        axes.plot([], [], color="#cccccc", lw=0.8, label=f"{len(found) - len(colored)} others")
    charts.scale_y(axes, [spread.mean for curve in found for spread in curve.spreads])
    axes.set_xlabel("optimizer steps")
    axes.set_ylabel(shown(tag, 40))
    charts.legend_beside(figure, axes)
    return figure


def _curve(axes: Axes, curve: LearningCurve, color: str, text: str) -> None:
    means, bars = [s.mean for s in curve.spreads], [s.bar for s in curve.spreads]
    axes.plot(curve.steps, means, color=color, lw=1.6, label=text, zorder=3)
    if any(bars):
        low, high = ([m + sign * bar for m, bar in zip(means, bars, strict=True)] for sign in (-1, 1))
        axes.fill_between(curve.steps, low, high, color=color, alpha=0.15, lw=0, zorder=2)
