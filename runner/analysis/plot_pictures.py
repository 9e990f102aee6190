"""Functions that draw the figures of a `Study`, a set of saved runs.

A study of parallel modes has up to three figures: the run time of each mode, the run time with and without a pipeline,
and the run time of the pipeline for each `split_size`. If there is no figure for `split_size`, the study also has
the figures of `runner.analysis.plot_quality` that suit the study.
"""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from runner.analysis import plot_quality
from runner.analysis.output import one_line
from runner.analysis.plot_runs import Point, Study
from runner.analysis.plot_split import SplitCurve, best_pipelines, is_pipeline, split_curves
from runner.analysis.plot_tables import format_value
from runner.tracking.charts import COLORS, canvas, shown
from runner.tracking.mean_std import Spread

_MOST_BARS, _MOST_UPRIGHT, _LONGEST = 24, 8, 60


def pictures(study: Study) -> dict[str, Figure]:
    """Return the figures of `study` by name; an empty dictionary if there is nothing to compare.

    The names are `modes`, `modes_and_pipeline`, `split_size`, and the names of the figures of `plot_quality`.
    """
    drawn: dict[str, Figure] = {}
    plain, pipelines = [point for point in study.points if not is_pipeline(point)], best_pipelines(study.points)
    if len({point.mode for point in plain}) > 1 and len(plain) <= _MOST_BARS:
        drawn["modes"] = _bars("Run time by parallel mode", study, plain)
    if pipelines and plain and len(plain) + len(pipelines) <= _MOST_BARS:
        drawn["modes_and_pipeline"] = _bars("Run time with and without a pipeline", study, [*plain, *pipelines])
    if curves := split_curves(study.points):
        return drawn | {"split_size": _over_split_size(study, curves)}
    quality = any(key.partition(".")[0] != "parallel" for key in study.keys)  # all modes reach the same quality
    figures = plot_quality.figures(study, _caption(study)) if quality and len(study.points) > 1 else {}
    return figures | plot_quality.curves(study, _caption(study)) | drawn


# ---------------------------------------------------------------------------------------------------------------------
# Modes


def _bars(title: str, study: Study, points: list[Point]) -> Figure:
    """Draw one bar per point. Its length shows the seconds per step; its label shows throughput and speed-up."""
    colors = {mode: COLORS[i % len(COLORS)] for i, mode in enumerate(dict.fromkeys(p.mode for p in points))}
    labels = [_label(point) for point in points]
    upright = len(points) <= _MOST_UPRIGHT and max(label.count("\n") for label in labels) < 4
    size = (max(5.0, 1.5 + 1.5 * len(points)), 4.0) if upright else (8.5, 1.2 + 0.32 * len(points))
    figure, (axes,) = canvas(title, _caption(study), size)
    for at, point in enumerate(points):
        _bar(axes, at, point.seconds, colors[point.mode], upright)
        single = study.single(point)
        speed = f"{single.seconds.mean / point.seconds.mean:.2f} ×" if single and single is not point else ""
        rate = point.samples_per_second.mean
        texts = [f"{rate:{',.0f' if rate >= 100 else '.3g'}} samples/s", *([speed] if speed else [])]
        end, text = point.seconds.mean + point.seconds.bar, ("\n" if upright else ", ").join(texts)
        where, by = ((at, end), (0, 4)) if upright else ((end, at), (5, 0))
        ha, va = ("center", "bottom") if upright else ("left", "center")
        axes.annotate(text, where, by, textcoords="offset points", ha=ha, va=va, color="#222222", fontsize=8.5)
    if upright:
        axes.margins(y=0.18)  # room for the labels above the bars
        axes.set_xticks(range(len(points)), labels, fontsize=9)
        axes.set_ylabel("seconds per step")
    else:
        axes.margins(x=0.3)
        axes.set_yticks(range(len(points)), [_line_label(point, study) for point in points], fontsize=8)
        axes.set_ylim(len(points) - 0.4, -0.6)
        axes.grid(visible=False, axis="y")
        axes.grid(axis="x", color="#dddddd", lw=0.7)
        axes.set_xlabel("seconds per step")
    return figure


def _label(point: Point) -> str:
    """Return the label of a point: its parallel mode, and one line for each of the other swept keys."""
    rest = {key.removeprefix("parallel."): value for key, value in point.values.items() if key != "parallel"}
    return "\n".join(shown(text, 24) for text in (point.mode, *(f"{k}={format_value(v)}" for k, v in rest.items())))


def _line_label(point: Point, study: Study) -> str:
    """Return the label of a horizontal bar: the parallel mode, and the other values that distinguish the point."""
    return ", ".join(filter(None, (shown(point.mode), plot_quality.label(point, study, without="parallel"))))


def _bar(axes: Axes, at: float, spread: Spread, color: str, upright: bool) -> None:
    if upright:
        axes.bar(at, spread.mean, 0.62, color=color)
    else:
        axes.barh(at, spread.mean, 0.66, color=color)
    if spread.bar:
        x, y, xerr, yerr = (at, spread.mean, None, spread.bar) if upright else (spread.mean, at, spread.bar, None)
        axes.errorbar(x, y, yerr, xerr, color="#222222", capsize=5, lw=1.2)


# ---------------------------------------------------------------------------------------------------------------------
# The pipeline over split_size


def _over_split_size(study: Study, curves: list[SplitCurve]) -> Figure:
    figure, (axes,) = canvas("Run time of the pipeline over split_size", _caption(study), (8, 4.0))
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
    name = shown(curve.label, _LONGEST) or "measured"
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
# Texts


def _caption(study: Study) -> str:
    counts = sorted({len(point.runs) for point in study.points})
    repeats = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else f"{counts[0]}"
    spread = "; error bars and bands: ± standard deviation" if counts[-1:] > [1] else ""
    machines = one_line("; ".join(study.machines))
    if len(machines) > _LONGEST:  # a longer line leaves no room for the axes
        machines = f"{machines[: _LONGEST - 1]}…"
    return f"{machines}. Runs per point: {repeats}{spread}"
