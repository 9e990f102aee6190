"""The pictures of a study, by name: the parallel modes, those beside the pipeline, the time over `split_size`; or,
where a study is about something else, the time and the result over what it swept.

The first three are those of the study that this project repeats: a ResNet50 cut in two, with and without a pipeline.
"""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from runner.tools.plot_runs import Point, Spread, Study
from runner.tools.plot_split import SplitCurve, best_pipelines, is_pipeline, split_curves
from runner.tools.plot_tables import shown

COLOURS = ("#2f6f9f", "#c8553d", "#5b8c5a", "#8e6c8a", "#b8860b", "#4c4c4c")
_MOST_POINTS = 60


def pictures(study: Study) -> dict[str, Figure]:
    """What there is to draw of `study`; nothing where it has a single point, or too many for a picture."""
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
    return drawn or {"sweep": _over_anything(study)}


# ---------------------------------------------------------------------------------------------------------------------
# Modes


def _bars(title: str, study: Study, points: list[Point]) -> Figure:
    """A bar a point: seconds per step, with throughput and speed-up written on it."""
    figure, (axes,) = _canvas(title, study, width=max(5.0, 1.5 + 1.5 * len(points)))
    colours = {mode: COLOURS[i % len(COLOURS)] for i, mode in enumerate(dict.fromkeys(p.mode for p in points))}
    for place, point in enumerate(points):
        _bar(axes, place, point.seconds, colours[point.mode])
        single = study.single(point)
        speed = f"\n{single.seconds.mean / point.seconds.mean:.2f} ×" if single and single is not point else ""
        told = f"{point.samples_per_second.mean:.3g} samples/s{speed}"
        axes.annotate(told, (place, 0), (0, 8), textcoords="offset points", ha="center", color="white", fontsize=9)
    axes.set_xticks(range(len(points)), [_label(point) for point in points])
    axes.set_ylabel("seconds per step")
    return figure


def _label(point: Point) -> str:
    """The mode, and a line for everything else that tells the point from others."""
    rest = {key.removeprefix("parallel."): value for key, value in point.values.items() if key != "parallel"}
    return "\n".join([point.mode, *(f"{key}={shown(value)}" for key, value in rest.items())])


def _bar(axes: Axes, place: float, spread: Spread, colour: str) -> None:
    axes.bar(place, spread.mean, 0.62, color=colour)
    if spread.bar:
        axes.errorbar(place, spread.mean, spread.bar, color="#222222", capsize=5, lw=1.2)


# ---------------------------------------------------------------------------------------------------------------------
# The pipeline over split_size


def _over_split_size(study: Study, curves: list[SplitCurve]) -> Figure:
    figure, (axes,) = _canvas("Run time of the pipeline over split_size", study, width=8)
    for colour, curve in zip(COLOURS * len(curves), curves, strict=False):
        _curve(axes, curve, colour)
    singles = {single.seconds.mean for c in curves if (single := study.single(c.best[1])) is not None}
    for seconds in singles:
        axes.axhline(seconds, color="#777777", ls=":", lw=1.2, label=f"single: {seconds:.3g} s")
    sizes = sorted({size for curve in curves for size, _ in curve.points})
    axes.set_xscale("log")  # small sizes lie as close together as they matter
    axes.set_xticks(sizes, map(str, sizes))
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("split_size: samples in a micro-batch")
    axes.set_ylabel("seconds per step")
    axes.legend(frameon=False, fontsize=9)
    return figure


def _curve(axes: Axes, curve: SplitCurve, colour: str) -> None:
    """Measured points with error bars, the theory below them, and the best marked."""
    sizes = [split_size for split_size, _ in curve.points]
    spreads = [point.seconds for _, point in curve.points]
    name = curve.label or "measured"
    means, bars = [s.mean for s in spreads], [s.bar for s in spreads]
    axes.errorbar(sizes, means, bars, color=colour, marker="o", ms=4, lw=1.4, capsize=4, label=name)
    fine = [sizes[0] * (sizes[-1] / sizes[0]) ** (i / 200) for i in range(201)]
    scale = curve.seconds_without_bubble
    told = f"GPipe's bubble alone: {scale:.3g} s · (m+{curve.stages - 1})/m"
    axes.plot(fine, [scale * curve.slowdown(size) for size in fine], color=colour, ls="--", lw=1.2, label=told)
    size, best = curve.best
    told = f"best: {size}, {best.seconds.mean:.3g} s"
    axes.plot(size, best.seconds.mean, marker="*", ms=16, ls="", color=colour, mec="white", zorder=5, label=told)


# ---------------------------------------------------------------------------------------------------------------------
# Anything else


def _over_anything(study: Study) -> Figure:
    """Two panels, seconds per step and the final metric, over the key with the most values; a line for each rest."""
    key = max(study.keys, key=lambda key: len({repr(point.values.get(key)) for point in study.points}))
    lines: dict[str, list[Point]] = {}
    for point in study.points:
        rest = ", ".join(f"{name}={shown(value)}" for name, value in point.values.items() if name != key)
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
"""A label, and (value of the swept key, what was measured there)."""


def _panel(axes: Axes, lines: list[Line]) -> None:
    """Lines over numbers; bars, side by side, over names."""
    values = [value for _, pairs in lines for value, _ in pairs]
    if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        _bars_over_names(axes, lines)
        return
    for colour, (label, pairs) in zip(COLOURS * len(lines), lines, strict=False):
        x, spreads = zip(*sorted(pairs, key=lambda pair: pair[0]), strict=True)
        means, bars = [s.mean for s in spreads], [s.bar for s in spreads]
        axes.errorbar(x, means, bars, color=colour, marker="o", ms=4, lw=1.4, capsize=4, label=label)
    if min(values) > 0 and max(values) / min(values) > 30:
        axes.set_xscale("log")


def _bars_over_names(axes: Axes, lines: list[Line]) -> None:
    names = list(dict.fromkeys(shown(value) for _, pairs in lines for value, _ in pairs))
    width = 0.8 / len(lines)
    for i, (label, pairs) in enumerate(lines):
        x = [names.index(shown(value)) + (i + 0.5) * width - 0.4 for value, _ in pairs]
        means, bars = [s.mean for _, s in pairs], [s.bar for _, s in pairs]
        axes.bar(x, means, 0.9 * width, yerr=bars, color=COLOURS[i % len(COLOURS)], capsize=4, label=label)
    axes.set_xticks(range(len(names)), names)


# ---------------------------------------------------------------------------------------------------------------------
# Paper


def _canvas(title: str, study: Study, width: float, panels: int = 1) -> tuple[Figure, list[Axes]]:
    """A sheet with a title, and below it where and how often was measured."""
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
    return f"{'; '.join(study.machines)}. Runs a point: {repeats}; bars: standard deviation"
