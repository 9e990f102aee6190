"""A Gantt chart of a pipeline's step, with a row for each worker, and a box for each computation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from runner.tracking.image_grids import font, to_tensor

if TYPE_CHECKING:
    import torch

COLORS = {
    "forward": ((66, 133, 244), (120, 170, 255)),
    "backward": ((52, 140, 90), (110, 185, 140)),
    "weights": ((214, 140, 40), (238, 186, 110)),
}
"""For each kind of computation: the color of a worker's first stage, and the color of the worker's other stages."""

_WIDTH, _ROW, _BAR, _MARGIN, _TOP, _BOTTOM = 1000, 46, 36, 74, 44, 50
_INK, _IDLE, _LINE, _WHITE = (40, 40, 40), (235, 235, 235), (205, 205, 205), (255, 255, 255)
_TICKS = 8


def gantt(work: Sequence[tuple[int, str, int, float, float]], workers: int, title: str) -> torch.Tensor:
    """Draw a Gantt chart of one step: an RGB image, uint8 [3, height, width].

    `work` has a tuple (stage, kind, micro-batch, start, stop) for each computation; start and stop are in seconds.
    Stage i is in row i modulo the number of `workers`.
    """
    from PIL import Image, ImageDraw

    begin, end = min(start for *_, start, _ in work), max(stop for *_, stop in work)
    scale, bottom = (_WIDTH - _MARGIN - 16) / max(end - begin, 1e-9), _TOP + workers * _ROW
    canvas = Image.new("RGB", (_WIDTH, bottom + _BOTTOM), _WHITE)
    draw = ImageDraw.Draw(canvas)
    draw.text((_WIDTH / 2, 16), title, _INK, font(14), anchor="mm")
    for tick in range(_TICKS + 1):
        seconds = (end - begin) * tick / _TICKS
        draw.line((_MARGIN + seconds * scale, _TOP - 4, _MARGIN + seconds * scale, bottom), _LINE)
        text = f"{seconds * 1000:.3g}{' ms' * (tick == 0)}"
        draw.text((_MARGIN + seconds * scale, bottom + 9), text, _INK, font(12), anchor="mm")
    row = "worker" if any(stage >= workers for stage, *_ in work) else "stage"
    for worker in range(workers):
        top = _TOP + worker * _ROW
        draw.text((_MARGIN - 10, top + _BAR / 2), f"{row} {worker}", _INK, font(13), anchor="rm")
        draw.rectangle((_MARGIN, top, _MARGIN + (end - begin) * scale, top + _BAR), _IDLE)
    for stage, kind, micro, start, stop in sorted(work, key=lambda each: each[3]):
        left, right = (_MARGIN + (moment - begin) * scale for moment in (start, stop))
        top = _TOP + stage % workers * _ROW
        draw.rectangle((left, top, max(left + 1, right), top + _BAR), COLORS[kind][stage >= workers], outline=_WHITE)
        if font(12).getlength(str(micro)) + 4 < right - left:
            draw.text(((left + right) / 2, top + _BAR / 2), str(micro), _WHITE, font(12), anchor="mm")

    drawn = {(kind, stage >= workers) for stage, kind, *_ in work}
    legend = [(COLORS[kind][further], kind + ", further stage" * further) for kind, further in sorted(drawn)]
    x, y = float(_MARGIN), canvas.height - 14
    for color, name in (*legend, (_IDLE, "idle")):
        draw.rectangle((x, y - 6, x + 12, y + 6), color)
        draw.text((x + 18, y), name, _INK, font(12), anchor="lm")
        x += 36 + font(12).getlength(name)
    return to_tensor(canvas)
