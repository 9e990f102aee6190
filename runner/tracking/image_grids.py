"""Images for TensorBoard: image grids, confusion matrices and bars of accuracy, as uint8 [3, height, width] tensors.

They are drawn with Pillow, which is installed with torchvision and includes a font.
"""

from __future__ import annotations

import functools
import io
import math
import unicodedata
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from PIL import Image, ImageDraw, ImageFont

GOOD, BAD, PLAIN = (20, 110, 60), (185, 35, 45), (90, 90, 90)
"""The background colors (RGB) of the captions of right, wrong and unrated images."""

_WHITE, _INK = (255, 255, 255), (40, 40, 40)
_DARKEST = (8, 48, 107)
_BAR = (47, 111, 159)
_GAP, _STRIP, _LINE, _FONT = 4, 18, 14, 12
_WIDEST = 160
_SPELLED = str.maketrans({"→": "->", "–": "-", "×": "x", "ß": "ss", "æ": "ae", "ø": "o", "ł": "l"})


def gif(frames: Iterable[torch.Tensor], seconds: float = 0.04) -> bytes:
    """Encode frames, each uint8 [3, height, width] on any device and shown for `seconds`, as a looping GIF."""
    first, *rest = (picture for frame in frames for picture in _to_pillow(frame[None]))
    buffer = io.BytesIO()
    first.save(buffer, "GIF", save_all=True, append_images=rest, duration=round(1000 * seconds), loop=0)
    return buffer.getvalue()


def grid(images: torch.Tensor, captions: Sequence[str], good: Sequence[bool] | None = None) -> torch.Tensor:
    """Arrange images in a square grid, each with a caption below it.

    Small images are scaled up by an integer factor, so that their longer side has at least 64 pixels; large images are
    scaled down, so that their longer side has 160 pixels.

    Args:
        images: uint8 [n, 1 or 3, height, width].
        captions: n captions, of one or two lines, which are truncated to 160 pixels.
        good: n flags, which make the captions green (True) or red (False); None makes all captions gray.
    """
    colors = [PLAIN] * len(images) if good is None else [GOOD if right else BAD for right in good]
    longer = max(images.shape[2:])
    factor = _WIDEST / longer if longer > _WIDEST else math.ceil(64 / longer)
    height, width = (max(1, round(factor * size)) for size in images.shape[2:])
    texts = ["\n".join(_truncated(line, _WIDEST - 8) for line in caption.split("\n")[:2]) for caption in captions]
    cell = max(width, 8 + _longest(line for text in texts for line in text.split("\n")))
    strip = _STRIP + _LINE * any("\n" in text for text in texts)
    cell_width, cell_height = cell + _GAP, height + strip + _GAP
    columns = max(1, math.ceil(math.sqrt(len(images))))
    rows = max(1, math.ceil(len(images) / columns))
    canvas, draw = _canvas(columns * cell_width + _GAP, rows * cell_height + _GAP)
    for i, (image, text, color) in enumerate(zip(_to_pillow(images, (width, height)), texts, colors, strict=True)):
        left, top = _GAP + i % columns * cell_width, _GAP + i // columns * cell_height
        canvas.paste(image, (left + (cell - width) // 2, top))
        draw.rectangle((left, top + height, left + cell - 1, top + height + strip - 1), color)
        center = (left + cell / 2, top + height + strip / 2)
        write(canvas, center, text, _WHITE, "mm")
    return to_tensor(canvas)


def class_shares(counts: torch.Tensor, class_names: Sequence[str], most: int = 40) -> torch.Tensor:
    """Draw the accuracy of each class that has samples as a bar, the `most` lowest ones, in ascending order.

    `counts` is a confusion matrix, int64 [classes, classes], whose rows are the true classes; on any device.
    """
    right, total = counts.diagonal().tolist(), counts.sum(1).tolist()
    shares = sorted((right[i] / total[i], i) for i in range(len(total)) if total[i])[:most]
    names = {i: _truncated(class_names[i], 110) for _, i in shares}
    margin = 16 + _longest(names.values())
    bar, row, top = 240, 20, 28
    canvas, draw = _canvas(margin + bar + 110, top + row * len(shares) + _GAP)
    title = "accuracy of each class" if len(shares) < most else f"the {most} classes with the lowest accuracy"
    write(canvas, (margin, top / 2), title, _INK, "lm")
    for number, (share, i) in enumerate(shares):
        y = top + row * number
        write(canvas, (margin - 8, y + row / 2), names[i], _INK, "rm")
        draw.rectangle((margin, y + 3, margin + bar, y + row - 4), (232, 236, 241))
        if share:
            draw.rectangle((margin, y + 3, margin + round(share * bar), y + row - 4), _BAR)
        text = f"{100 * share:.1f} %  of {total[i]}"
        write(canvas, (margin + bar + 8, y + row / 2), text, _INK, "lm")
    return to_tensor(canvas)


def confusion_matrix(counts: torch.Tensor, class_names: Sequence[str]) -> torch.Tensor:
    """Draw a confusion matrix: how often samples of each true class (rows) were predicted as each class (columns).

    A cell with a fraction x of the samples in its row has the darkness √x, so that rare errors are visible. A matrix of
    up to 20 classes is drawn with names and counts, a larger one as a heat map. `counts` is int64 [classes, classes].
    """
    counts, num_classes = counts.cpu(), len(counts)
    names = [_truncated(name, 110) for name in class_names] if num_classes <= 20 else []
    cell = 44 if names else max(1, 800 // num_classes)
    margin = 30 + _longest(names)
    end = margin + num_classes * cell
    canvas, draw = _canvas(end + _GAP, end + _GAP)
    shares = counts / counts.sum(1, keepdim=True).clamp(min=1)  # avoids 0/0 for a class without samples
    white, darkest = (torch.tensor(color)[:, None, None] for color in (_WHITE, _DARKEST))
    shades = (white + (darkest - white) * shares.sqrt()).round().to(torch.uint8)
    [cells] = _to_pillow(shades[None], (num_classes * cell, num_classes * cell))
    canvas.paste(cells, (margin, margin))
    for i, name in enumerate(names):
        middle = margin + (i + 0.5) * cell
        write(canvas, (margin - 6, middle), name, _INK, "rm")
        _draw_upwards(draw, name, middle, margin - 6)
        for j, (count, share) in enumerate(zip(counts[i].tolist(), shares[i].tolist(), strict=True)):
            color = _WHITE if share > 0.25 else _INK  # the square root is 0.5: half of the darkest blue
            text = str(count) if count < 100_000 else f"{count:.0e}"
            write(canvas, (margin + (j + 0.5) * cell, middle), text, color, "mm")
    draw.rectangle((margin - 1, margin - 1, end, end), outline=_INK)
    write(canvas, ((margin + end) / 2, 4), "predicted", _INK, "mt")
    _draw_upwards(draw, "true", 10, (margin + end) / 2)
    return to_tensor(canvas)


def png(picture: torch.Tensor) -> bytes:
    """Return an image, uint8 [1 or 3, height, width], encoded as an RGB PNG."""
    buffer = io.BytesIO()
    [image] = _to_pillow(picture[None])
    image.save(buffer, "PNG", compress_level=3)  # half the time of Pillow's 6, for a tenth to a third more bytes
    return buffer.getvalue()


def _canvas(width: int, height: int) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    from PIL import Image, ImageDraw

    canvas = Image.new("RGB", (width, height), _WHITE)
    return canvas, ImageDraw.Draw(canvas)


def _longest(texts: Iterable[str]) -> int:
    return math.ceil(max(map(_length, texts), default=0))


@functools.lru_cache(2000)
def _length(text: str) -> float:
    return font(_FONT).getlength(text)


def write(canvas: Image.Image, place: tuple[float, float], text: str, color: tuple[int, int, int], anchor: str) -> None:
    """Draw `text` at (column, row) as `ImageDraw.text` does, in a fifth of its time if the text was drawn before."""
    (x, column), (y, row) = map(math.modf, place)
    mask, left, top = _pixels(text, anchor, x, y)
    canvas.paste(color, (int(column) + left, int(row) + top), mask)


@functools.lru_cache(2000)
def _pixels(text: str, anchor: str, x: float, y: float) -> tuple[Image.Image, int, int]:
    """Return `text` drawn at (x, y) as a mask, and the column and row of the mask's upper left pixel."""
    from PIL import Image, ImageDraw

    style: Any = {"font": font(_FONT), "anchor": anchor, "align": "center", "spacing": 2}
    box = ImageDraw.Draw(Image.new("L", (1, 1))).textbbox((x, y), text, **style)
    left, top, right, bottom = (round(edge) + border for edge, border in zip(box, (-2, -2, 2, 2), strict=True))
    mask = Image.new("L", (right - left, bottom - top))
    ImageDraw.Draw(mask).text((x - left, y - top), text, 255, **style)
    return mask, left, top


def _draw_upwards(draw: ImageDraw.ImageDraw, text: str, middle: float, bottom: float) -> None:
    """Draw `text` from bottom to top, starting at the pixel row `bottom` and centered on the pixel column `middle`."""
    from PIL import Image, ImageFont

    upwards = ImageFont.TransposedFont(font(_FONT), Image.Transpose.ROTATE_90)
    _, _, width, height = upwards.getbbox(text)
    draw.text((round(middle - width / 2), round(bottom - height)), text, _INK, upwards)


@functools.lru_cache(2000)
def _truncated(text: str, width: int) -> str:
    """Return what fits of `text`, on one line and without accents: the font draws non-ASCII letters as boxes."""
    text = unicodedata.normalize("NFKD", " ".join(text.translate(_SPELLED).split()))
    text = "".join(letter for letter in text if not unicodedata.combining(letter))
    if font(_FONT).getlength(text) <= width:
        return text
    text = text[:width]  # every letter is at least one pixel wide; keeps the loop short
    while text and font(_FONT).getlength(text + "…") > width:
        text = text[:-1]
    return text + "…"


@functools.cache
def font(size: int) -> ImageFont.FreeTypeFont:
    """Return the font that Pillow includes, `size` pixels high."""
    from PIL import ImageFont

    font = ImageFont.load_default(size)
    assert isinstance(font, ImageFont.FreeTypeFont), "a font with a size is a FreeType font"
    return font


def _to_pillow(images: torch.Tensor, size: tuple[int, int] | None = None) -> list[Image.Image]:
    """Convert a tensor, uint8 [n, 1 or 3, height, width], to RGB images, scaled to `size`, which is (width, height)."""
    from PIL import Image

    pixels = images.cpu().expand(-1, 3, -1, -1).permute(0, 2, 3, 1).contiguous().numpy()
    pictures = [Image.frombytes("RGB", (images.shape[3], images.shape[2]), each.tobytes()) for each in pixels]
    return pictures if size is None else [each.resize(size, Image.Resampling.BOX) for each in pictures]


def to_tensor(canvas: Image.Image) -> torch.Tensor:
    """Convert an RGB image to a tensor, uint8 [3, height, width]."""
    pixels = torch.frombuffer(bytearray(canvas.tobytes()), dtype=torch.uint8)
    return pixels.view(canvas.height, canvas.width, 3).permute(2, 0, 1).contiguous()
