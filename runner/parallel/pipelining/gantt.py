"""A Gantt chart of a pipeline's step, with a row for each worker, and a box for each computation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from runner.tracking.image_grids import font, to_tensor

if TYPE_CHECKING:
    import torch
    from PIL import ImageDraw

COLORS = {
    "forward": ((66, 133, 244), (120, 170, 255)),
    "backward": ((52, 140, 90), (110, 185, 140)),
    "weights": ((214, 140, 40), (238, 186, 110)),
}
"""For each kind of computation: the color of a worker's first stage, and the color of the worker's other stages."""

_WIDTH, _ROW, _BAR, _MARGIN, _TOP, _BOTTOM = 1000, 46, 36, 74, 44, 50
_INK, _IDLE, _LINE, _WHITE = (40, 40, 40), (235, 235, 235), (205, 205, 205), (255, 255, 255)


def gantt(work: Sequence[tuple[int, str, int, float, float]], workers: int, title: str) -> torch.Tensor:
    """Draw a Gantt chart of one step: an RGB image, uint8 [3, height, width].

    `work` has a tuple (stage, kind, micro-batch, start, stop) for each computation; start and stop are in seconds.
    Stage i is in row i modulo the number of `workers`.
    """
    from PIL import Image, ImageDraw

    begin, end = min(start for *_, start, _ in work), max(stop for *_, stop in work)
    scale = (_WIDTH - _MARGIN - 16) / max(end - begin, 1e-9)
    canvas = Image.new("RGB", (_WIDTH, _TOP + workers * _ROW + _BOTTOM), _WHITE)
    draw = ImageDraw.Draw(canvas)
    draw.text((_WIDTH / 2, 16), title, _INK, font(14), anchor="mm")
    _draw_axis(draw, end - begin, scale, _TOP + workers * _ROW)
    row = "worker" if any(stage >= workers for stage, *_ in work) else "stage"
    for worker in range(workers):
        top = _TOP + worker * _ROW
        draw.text((_MARGIN - 10, top + _BAR / 2), f"{row} {worker}", _INK, font(13), anchor="rm")
        draw.rectangle((_MARGIN, top, _MARGIN + (end - begin) * scale, top + _BAR), _IDLE)
    for stage, kind, micro, start, stop in sorted(work, key=lambda each: each[3]):
        left, right = (_MARGIN + (moment - begin) * scale for moment in (start, stop))
        top = _TOP + stage % workers * _ROW
        further = stage >= workers
        draw.rectangle((left, top, max(left + 1, right), top + _BAR), COLORS[kind][further], outline=_WHITE)
        if font(12).getlength(str(micro)) + 4 < right - left:
            draw.text(((left + right) / 2, top + _BAR / 2), str(micro), _WHITE, font(12), anchor="mm")
    _draw_legend(draw, {(kind, stage >= workers) for stage, kind, *_ in work}, canvas.height - 14)
    return to_tensor(canvas)


def _draw_axis(draw: ImageDraw.ImageDraw, seconds: float, scale: float, bottom: float) -> None:
    """Draw a time axis with ticks at round numbers of milliseconds."""
    step = _round_step(seconds * 1000 / 8)
    for tick in range(int(seconds * 1000 / step) + 1):
        x = _MARGIN + tick * step / 1000 * scale
        draw.line((x, _TOP - 4, x, bottom), _LINE)
        unit = " ms" if tick == 0 else ""
        draw.text((x, bottom + 9), f"{tick * step:g}{unit}", _INK, font(12), anchor="mm")


def _round_step(at_least: float) -> float:
    """Return the smallest number ≥ `at_least` that is 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(max(at_least, 1e-6)))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= at_least)


def _draw_legend(draw: ImageDraw.ImageDraw, kinds: set[tuple[str, bool]], y: float) -> None:
    x = float(_MARGIN)
    for kind, colors in COLORS.items():
        for further in (False, True):
            if (kind, further) not in kinds:
                continue
            draw.rectangle((x, y - 6, x + 12, y + 6), colors[further])
            name = f"{kind}, further stage" if further else kind
            draw.text((x + 18, y), name, _INK, font(12), anchor="lm")
            x += 36 + font(12).getlength(name)
    draw.rectangle((x, y - 6, x + 12, y + 6), _IDLE)
    draw.text((x + 18, y), "idle", _INK, font(12), anchor="lm")
