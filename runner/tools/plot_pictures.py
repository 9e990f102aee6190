"""Draws the figures of a study.

A study of parallel modes has up to three figures: run time by mode, run time with and without a pipeline, and run time
of the pipeline over `split_size`. Any other study has one figure: step time and final metric over the swept key.
"""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from runner.tools.plot_runs import Point, Spread, Study
from runner.tools.plot_split import SplitCurve, best_pipelines, is_pipeline, split_curves
from runner.tools.plot_tables import format_value

COLORS = ("#2f6f9f", "#c8553d", "#5b8c5a", "#8e6c8a", "#b8860b", "#4c4c4c")
_MOST_POINTS = 60


def pictures(study: Study) -> dict[str, Figure]:
    """Return the figures of `study` by name; an empty dictionary for fewer than 2 points or more than 60 points."""
    if not 2 <= len(study.points) <= _MOST_POINTS:
        return {}
    drawn: dict[str, Figure] = {}
    plain, pipelines = [point for point in study.points if not is_pipeline(point)], best_pipelines(study.points)
    if len({point.mode for point in plain}) > 1:
        drawn["modes"] = _bars("Run time by parallel mode", study, plain)
    if pipelines and plain:
        drawn["modes_and_pipeline"] = _bars("Run time with and without a pipeline", study, [*plain, *pipelines])
    if curves := split_curves(study.points):
        drawn["split_size"] = _over_split_size(study, curves)
    return drawn or {"sweep": _over_swept_key(study)}


# ---------------------------------------------------------------------------------------------------------------------
# Modes


def _bars(title: str, study: Study, points: list[Point]) -> Figure:
    """Draw one bar per point: its height shows the seconds per step, its label the throughput and the speed-up."""
    figure, (axes,) = _canvas(title, study, width=max(5.0, 1.5 + 1.5 * len(points)))
    colors = {mode: COLORS[i % len(COLORS)] for i, mode in enumerate(dict.fromkeys(p.mode for p in points))}
    for x, point in enumerate(points):
        _bar(axes, x, point.seconds, colors[point.mode])
        single = study.single(point)
        speed = f"\n{single.seconds.mean / point.seconds.mean:.2f} ×" if single and single is not point else ""
        label = f"{point.samples_per_second.mean:.3g} samples/s{speed}"
        axes.annotate(label, (x, 0), (0, 8), textcoords="offset points", ha="center", color="white", fontsize=9)
    axes.set_xticks(range(len(points)), [_label(point) for point in points])
    axes.set_ylabel("seconds per step")
    return figure


def _label(point: Point) -> str:
    """Return the label of a point: its parallel mode, and one line for each of the other swept keys."""
    rest = {key.removeprefix("parallel."): value for key, value in point.values.items() if key != "parallel"}
    return "\n".join([point.mode, *(f"{key}={format_value(value)}" for key, value in rest.items())])


def _bar(axes: Axes, x: float, spread: Spread, color: str) -> None:
    axes.bar(x, spread.mean, 0.62, color=color)
    if spread.bar:
        axes.errorbar(x, spread.mean, spread.bar, color="#222222", capsize=5, lw=1.2)


# ---------------------------------------------------------------------------------------------------------------------
# The pipeline over split_size


def _over_split_size(study: Study, curves: list[SplitCurve]) -> Figure:
    figure, (axes,) = _canvas("Run time of the pipeline over split_size", study, width=8)
    for color, curve in zip(COLORS * len(curves), curves, strict=False):
        _curve(axes, curve, color)
    singles = {single.seconds.mean for c in curves if (single := study.single(c.best[1])) is not None}
    for seconds in singles:
        axes.axhline(seconds, color="#777777", ls=":", lw=1.2, label=f"single: {seconds:.3g} s")
    sizes = sorted({size for curve in curves for size, _ in curve.points})
    axes.set_xscale("log")  # the time changes most between small sizes
    axes.set_xticks(sizes, map(str, sizes))
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("split_size: samples in a micro-batch")
    axes.set_ylabel("seconds per step")
    axes.legend(frameon=False, fontsize=9)
    return figure


def _curve(axes: Axes, curve: SplitCurve, color: str) -> None:
    """Draw the measured points with error bars, the theoretical lower bound, and a star at the best point."""
    sizes = [split_size for split_size, _ in curve.points]
    spreads = [point.seconds for _, point in curve.points]
    name = curve.label or "measured"
    means, bars = [s.mean for s in spreads], [s.bar for s in spreads]
    axes.errorbar(sizes, means, bars, color=color, marker="o", ms=4, lw=1.4, capsize=4, label=name)
    fine = [sizes[0] * (sizes[-1] / sizes[0]) ** (i / 200) for i in range(201)]
    scale = curve.seconds_without_bubble
    theory = f"GPipe's bubble alone: {scale:.3g} s · (m+{curve.stages - 1})/m"
    axes.plot(fine, [scale * curve.slowdown(size) for size in fine], color=color, ls="--", lw=1.2, label=theory)
    size, best = curve.best
    optimum = f"best: {size}, {best.seconds.mean:.3g} s"
    axes.plot(size, best.seconds.mean, marker="*", ms=16, ls="", color=color, mec="white", zorder=5, label=optimum)


# ---------------------------------------------------------------------------------------------------------------------
# Other studies


def _over_swept_key(study: Study) -> Figure:
    """Draw step time and final metric over the swept key with the most values; the other keys distinguish the lines."""
    key = max(study.keys, key=lambda key: len({repr(point.values.get(key)) for point in study.points}))
    lines: dict[str, list[Point]] = {}
    for point in study.points:
        rest = ", ".join(f"{name}={format_value(value)}" for name, value in point.values.items() if name != key)
        lines.setdefault(rest, []).append(point)
    titles = ["seconds per step", *([study.metric] if any(point.final for point in study.points) else [])]
    figure, panels = _canvas(f"Over {key}", study, width=5.4 * len(titles), panels=len(titles))
    for number, (axes, title) in enumerate(zip(panels, titles, strict=True), start=1):
        measured: list[Line] = [
            (rest, [(p.values.get(key), s) for p in points if (s := p.final if number == 2 else p.seconds)])
            for rest, points in lines.items()
        ]
        _panel(axes, [line for line in measured if line[1]])
        axes.set_xlabel(key)
        axes.set_ylabel(title)
        if len(lines) > 1:
            axes.legend(frameon=False, fontsize=9)
    return figure


Line = tuple[str, list[tuple[Any, Spread]]]
"""A label, and pairs of the value of the swept key and the measurements at that value."""


def _panel(axes: Axes, lines: list[Line]) -> None:
    """Draw `lines` as lines if the values of the swept key are numbers, and as grouped bars otherwise."""
    values = [value for _, pairs in lines for value, _ in pairs]
    if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        _bars_over_names(axes, lines)
        return
    for color, (label, pairs) in zip(COLORS * len(lines), lines, strict=False):
        x, spreads = zip(*sorted(pairs, key=lambda pair: pair[0]), strict=True)
        means, bars = [s.mean for s in spreads], [s.bar for s in spreads]
        axes.errorbar(x, means, bars, color=color, marker="o", ms=4, lw=1.4, capsize=4, label=label)
    if min(values) > 0 and max(values) / min(values) > 30:
        axes.set_xscale("log")


def _bars_over_names(axes: Axes, lines: list[Line]) -> None:
    names = list(dict.fromkeys(format_value(value) for _, pairs in lines for value, _ in pairs))
    width = 0.8 / len(lines)
    for i, (label, pairs) in enumerate(lines):
        x = [names.index(format_value(value)) + (i + 0.5) * width - 0.4 for value, _ in pairs]
        means, bars = [s.mean for _, s in pairs], [s.bar for _, s in pairs]
        axes.bar(x, means, 0.9 * width, yerr=bars, color=COLORS[i % len(COLORS)], capsize=4, label=label)
    axes.set_xticks(range(len(names)), names)


# ---------------------------------------------------------------------------------------------------------------------
# Layout


def _canvas(title: str, study: Study, width: float, panels: int = 1) -> tuple[Figure, list[Axes]]:
    """Return a figure without data, and the axes of each of its panels.

    The caption of the figure names the machines and the number of repeats.

    Args:
        title: the title of the figure.
        study: the study to draw.
        width: width of the figure in inches.
        panels: number of panels side by side.
    """
    figure = Figure(figsize=(width, 4.4), dpi=120, layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    axes = [figure.add_subplot(1, panels, 1 + number) for number in range(panels)]
    axes[0].set_title(_caption(study), loc="left", fontsize=8, color="#666666")
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
        each.grid(axis="y", color="#dddddd", lw=0.7)
        each.set_axisbelow(True)
    return figure, axes


def _caption(study: Study) -> str:
    counts = sorted({len(point.runs) for point in study.points})
    repeats = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else f"{counts[0]}"
    return f"{'; '.join(study.machines)}. Runs per point: {repeats}; error bars: standard deviation"
