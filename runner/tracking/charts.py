"""Functions that draw charts with matplotlib.

Only the extra `plot` installs matplotlib, so import this module inside the functions that need it.
"""

from __future__ import annotations

import itertools
import math
import statistics
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from runner.config.errors import escaped
from runner.config.overrides import as_typed
from runner.system.utf8 import printable
from runner.tracking.mean_std import Spread

if TYPE_CHECKING:
    from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

COLORS = ("#2f6f9f", "#c8553d", "#5b8c5a", "#8e6c8a", "#b8860b", "#4c4c4c")
GRAY = "#666666"
_MOST_TICKS = 10
_LONGEST_NAME = 26


# ---------------------------------------------------------------------------------------------------------------------
# Figures


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
    wrapped = textwrap.fill(caption, int(15 * (panel[0] * across - 0.8)))
    axes[0].set_title(without_formulas(wrapped), loc="left", fontsize=8, color=GRAY)
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
        each.grid(axis="y", color="#dddddd", lw=0.7)
        each.set_axisbelow(True)
    return figure, axes


def legend_beside(figure: Figure, axes: Axes) -> None:
    """Show the legend of `axes` to the right of all panels, if the legend has more than one entry."""
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) > 1:
        figure.legend(handles, labels, loc="outside right center", frameon=False, fontsize=9)


def image_summary(tag: str, figure: Figure) -> Summary:
    """Return a TensorBoard summary that contains the figure as an image."""
    import torch  # imported here, so that errors are reported without waiting for it
    from torch.utils.tensorboard.summary import image

    drawing = FigureCanvasAgg(figure)
    drawing.draw()
    pixels = torch.frombuffer(bytearray(drawing.buffer_rgba()), dtype=torch.uint8)
    width, height = drawing.get_width_height()
    return image(tag, pixels.view(height, width, 4)[:, :, :3].permute(2, 0, 1), dataformats="CHW")


def shown(value: object, longest: int = _LONGEST_NAME) -> str:
    """Return a config value as the user types it, shortened to `longest` characters to fit into a figure."""
    text = escaped(printable(" ".join(as_typed(value)[:400].split())))
    if len(text) > longest:  # the end of a path says more than its beginning
        text = f"…{text[-longest + 1 :]}" if "/" in text else f"{text[: longest - 1]}…"
    return without_formulas(text)


def distinct(texts: Iterable[str]) -> list[str]:
    """Make texts distinct by appending a number to each repetition of a text, such as `text (2)`.

    Repetitions occur because different values may become the same text when they are shortened.
    """
    counts, found = Counter[str](), []
    for text in texts:
        counts[text] += 1
        found.append(text if counts[text] == 1 else f"{text} ({counts[text]})")
    return found


def without_formulas(text: str) -> str:
    """Return `text` with dollar signs escaped, because matplotlib would read them as the beginning of a formula.

    This must come after shortening and wrapping, which might separate the backslash from the dollar sign.
    """
    return text.replace("$", r"\$")


# ---------------------------------------------------------------------------------------------------------------------
# Axes


def is_number(value: object) -> bool:
    """Return whether a config value is a number that can be drawn on an axis: finite, and not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def is_geometric(values: Iterable[float]) -> bool:
    """Return whether neighboring values have similar ratios rather than similar differences, as in 1, 3, 10.

    Zeros are ignored, as in `weight_decay=0,1e-4,1e-3`.
    """
    ordered = sorted({value for value in values if value != 0})
    if len(ordered) < 2 or ordered[0] < 0:
        return False
    if len(ordered) == 2:
        return ordered[1] / ordered[0] >= 10
    logs = [math.log(value) for value in ordered]
    return _unevenness(logs) < _unevenness(ordered) and ordered[-1] / ordered[0] > 3


def _unevenness(values: Sequence[float]) -> float:
    gaps = [after - before for before, after in itertools.pairwise(values)]
    mean = statistics.fmean(gaps)
    return statistics.pstdev(gaps) / mean if mean else math.inf  # the logarithms of large values may be equal


def scale_x(axes: Axes, values: Iterable[float]) -> None:
    """Choose a linear or logarithmic x-axis for `values`, with a tick at each value if there is room for all ticks."""
    ordered = sorted(set(values))
    if is_geometric(ordered):
        if ordered[0] > 0:
            axes.set_xscale("log")
        else:
            axes.set_xscale("symlog", linthresh=ordered[1], linscale=0.5)
    if len(ordered) <= _MOST_TICKS:
        at = axes.transScale.transform([(value, 1.0) for value in ordered])[:, 0]
        width = at[-1] - at[0]
        if all(after - before >= 0.07 * width for before, after in itertools.pairwise(at)):
            axes.set_xticks(ordered, [f"{value:.6g}" for value in ordered])
            axes.minorticks_off()
            axes.tick_params(axis="x", labelrotation=30 if len(ordered) > 7 else 0)


def scale_y(axes: Axes, values: Iterable[float]) -> None:
    """Choose a logarithmic y-axis if all finite `values` are positive and span a factor of over 100."""
    finite = [value for value in values if math.isfinite(value)]
    if finite and min(finite) > 0 and max(finite) / min(finite) > 100:
        axes.set_yscale("log")


# ---------------------------------------------------------------------------------------------------------------------
# Charts


def line(axes: Axes, x: Sequence[float], spreads: Sequence[Spread], color: str, label: str | None = None) -> None:
    """Draw the means of `spreads` as a line with markers, and the standard deviations as a band around the line."""
    means = [spread.mean for spread in spreads]
    axes.plot(x, means, color=color, marker="o", ms=4, lw=1.6, label=label, zorder=3)
    if any(spread.bar for spread in spreads):
        low, high = ([mean + sign * s.bar for mean, s in zip(means, spreads, strict=True)] for sign in (-1, 1))
        axes.fill_between(x, low, high, color=color, alpha=0.18, lw=0, zorder=2)


def bars(axes: Axes, groups: dict[str, list[tuple[str, Spread]]], values: bool = True) -> None:
    """Draw a bar chart with error bars. Each name on the x-axis has one bar for each group.

    Args:
        axes: the axes to draw on.
        groups: the bars of each group, as a list of pairs (name, spread). The keys are the labels of the groups in the
            legend. A group may lack some of the names.
        values: whether to write the mean above each bar.
    """
    names = list(dict.fromkeys(name for pairs in groups.values() for name, _ in pairs))
    width = 0.8 / len(groups)
    for i, (label, pairs) in enumerate(groups.items()):
        x = [names.index(name) + (i + 0.5) * width - 0.4 for name, _ in pairs]
        color = COLORS[i % len(COLORS)]
        axes.bar(x, [s.mean for _, s in pairs], 0.9 * width, color=color, label=label, zorder=2)
        for at, (_, spread) in zip(x, pairs, strict=True):
            if spread.bar:
                axes.errorbar(at, spread.mean, spread.bar, color="#222222", capsize=4, lw=1.2, zorder=4)
            if values:
                top = spread.mean + math.copysign(spread.bar, spread.mean)
                up = 1 if spread.mean >= 0 else -1
                va = "bottom" if up > 0 else "top"
                axes.annotate(
                    _digits(spread.mean),
                    (at, top),
                    (0, 3 * up),
                    textcoords="offset points",
                    ha="center",
                    va=va,
                    fontsize=8,
                )
    axes.axhline(0, color="#222222", lw=0.8)
    axes.margins(y=0.12)
    axes.set_xticks(range(len(names)), names)


def ranking(axes: Axes, entries: Sequence[tuple[str, Spread, Sequence[float]]]) -> None:
    """Draw a row for each entry, from top to bottom: its mean with an error bar, and its single measurements as dots.

    Args:
        axes: the axes to draw on.
        entries: a tuple (label, spread, single measurements) for each row.
    """
    for y, (_, spread, measured) in enumerate(entries):
        axes.plot(measured, [y] * len(measured), "o", ms=4, color="#bbbbbb", mew=0, zorder=2)
        axes.errorbar(
            spread.mean, y, xerr=spread.bar or None, fmt="o", ms=6, color=COLORS[0], capsize=3, lw=1.4, zorder=3
        )
        text = f"{_digits(spread.mean)}"
        axes.annotate(text, (1.01, y), xycoords=("axes fraction", "data"), va="center", fontsize=8, color="#222222")
    axes.set_yticks(range(len(entries)), [label for label, *_ in entries])
    axes.set_ylim(len(entries) - 0.4, -0.6)
    axes.grid(axis="x", color="#dddddd", lw=0.7)


def over_values(axes: Axes, measured: Sequence[tuple[Any, float]]) -> None:
    """Draw measurements as dots over the values of a config key, with their mean and standard deviation for each value.

    Args:
        axes: the axes to draw on.
        measured: pairs (value of the key, measurement).
    """
    values = list(dict.fromkeys(value for value, _ in measured))
    names = distinct(map(shown, values))
    is_line = all(map(is_number, values))
    places = {value: float(value) if is_line else float(index) for index, value in enumerate(values)}
    groups: dict[float, list[float]] = {}
    for value, number in measured:
        groups.setdefault(places[value], []).append(number)
    for x, numbers in groups.items():
        axes.plot([x] * len(numbers), numbers, "o", ms=4, color="#999999", alpha=0.6, mew=0, zorder=2)
    x, spreads = list(groups), [Spread.of(numbers) for numbers in groups.values()]
    if is_line:
        order = sorted(range(len(x)), key=x.__getitem__)
        if max(map(len, groups.values())) > 1 or len(x) <= _MOST_TICKS:  # a line through single values is noise
            line(axes, [x[i] for i in order], [spreads[i] for i in order], COLORS[0])
        scale_x(axes, x)
    else:
        for at, spread in zip(x, spreads, strict=True):
            axes.errorbar(
                at, spread.mean, spread.bar or None, fmt="D", ms=7, color=COLORS[0], capsize=5, lw=1.6, zorder=3
            )
        axes.set_xticks(range(len(names)), names)
        axes.set_xlim(-0.6, len(names) - 0.4)
        if sum(map(len, names)) > 30:
            axes.tick_params(axis="x", labelrotation=30)
            for label in axes.get_xticklabels():
                label.set_horizontalalignment("right")


def heat_map(
    figure: Figure, axes: Axes, cells: dict[tuple[Any, Any], float], title: str, larger_is_better: bool
) -> None:
    """Draw a heat map with one number for each pair of values. Better numbers have brighter cells.

    Args:
        figure: the figure of `axes`.
        axes: the axes to draw on.
        cells: the numbers by (value of the key on the x-axis, value of the key on the y-axis).
        title: the label of the color bar, which says what the numbers are.
        larger_is_better: whether larger numbers are better.
    """
    columns, rows = (_in_order({pair[side] for pair in cells}, [pair[side] for pair in cells]) for side in (0, 1))
    grid = [[cells.get((column, row), math.nan) for column in columns] for row in rows]
    colors = matplotlib.colormaps["viridis" if larger_is_better else "viridis_r"]
    drawn = axes.imshow(grid, cmap=colors, aspect="auto", origin="lower")
    low, high = min(cells.values()), max(cells.values())
    size = 8 if max(len(columns), len(rows)) <= 8 else 6
    for y, row in enumerate(grid):
        for x, number in enumerate(row):
            if math.isfinite(number) and len(columns) <= 14:
                share = (number - low) / (high - low) if high > low else 1.0
                color = "black" if (share if larger_is_better else 1 - share) > 0.55 else "white"
                axes.text(x, y, _digits(number), ha="center", va="center", color=color, fontsize=size)
    axes.set_xticks(range(len(columns)), [shown(value, 16) for value in columns])
    axes.set_yticks(range(len(rows)), [shown(value, 16) for value in rows])
    if not all(map(is_number, rows)):
        axes.invert_yaxis()
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    bar = figure.colorbar(drawn, ax=axes, label=title, shrink=0.9)
    bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]


def _in_order(values: set[Any], found: list[Any]) -> list[Any]:
    """Return `values` as a list: sorted if all are numbers, otherwise in the order in which they occur in `found`."""
    return sorted(values) if all(is_number(value) for value in values) else list(dict.fromkeys(found))


def _digits(value: float) -> str:
    return f"{value:.4g}" if abs(value) >= 1 else f"{value:.4f}" if abs(value) >= 0.001 else f"{value:.2e}"
