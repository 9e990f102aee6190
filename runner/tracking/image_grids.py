"""Images for TensorBoard: image grids, confusion matrices and bars of accuracy, as uint8 [3, height, width] tensors.

They are drawn with Pillow, which is installed with torchvision and includes a font.
"""

from __future__ import annotations

import functools
import io
import math
import unicodedata
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

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
    first, *rest = map(_to_pillow, frames)
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
    for i, (image, text, color) in enumerate(zip(images, texts, colors, strict=True)):
        left, top = _GAP + i % columns * cell_width, _GAP + i // columns * cell_height
        canvas.paste(_to_pillow(image, (width, height)), (left + (cell - width) // 2, top))
        draw.rectangle((left, top + height, left + cell - 1, top + height + strip - 1), color)
        center = (left + cell / 2, top + height + strip / 2)
        draw.text(center, text, _WHITE, font(_FONT), anchor="mm", align="center", spacing=2)
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
    draw.text((margin, top / 2), title, _INK, font(_FONT), anchor="lm")
    for number, (share, i) in enumerate(shares):
        y = top + row * number
        draw.text((margin - 8, y + row / 2), names[i], _INK, font(_FONT), anchor="rm")
        draw.rectangle((margin, y + 3, margin + bar, y + row - 4), (232, 236, 241))
        if share:
            draw.rectangle((margin, y + 3, margin + round(share * bar), y + row - 4), _BAR)
        text = f"{100 * share:.1f} %  of {total[i]}"
        draw.text((margin + bar + 8, y + row / 2), text, _INK, font(_FONT), anchor="lm")
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
    canvas.paste(_to_pillow(shades, (num_classes * cell, num_classes * cell)), (margin, margin))
    for i, name in enumerate(names):
        middle = margin + (i + 0.5) * cell
        draw.text((margin - 6, middle), name, _INK, font(_FONT), anchor="rm")
        _draw_upwards(draw, name, middle, margin - 6)
        for j, count in enumerate(counts[i].tolist()):
            color = _WHITE if shares[i, j] > 0.25 else _INK  # the square root is 0.5: half of the darkest blue
            text = str(count) if count < 100_000 else f"{count:.0e}"
            draw.text((margin + (j + 0.5) * cell, middle), text, color, font(_FONT), anchor="mm")
    draw.rectangle((margin - 1, margin - 1, end, end), outline=_INK)
    draw.text(((margin + end) / 2, 4), "predicted", _INK, font(_FONT), anchor="mt")
    _draw_upwards(draw, "true", 10, (margin + end) / 2)
    return to_tensor(canvas)


def png(picture: torch.Tensor) -> bytes:
    """Return an image, uint8 [1 or 3, height, width], encoded as an RGB PNG."""
    buffer = io.BytesIO()
    _to_pillow(picture).save(buffer, "PNG")
    return buffer.getvalue()


def _canvas(width: int, height: int) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    from PIL import Image, ImageDraw

    canvas = Image.new("RGB", (width, height), _WHITE)
    return canvas, ImageDraw.Draw(canvas)


def _longest(texts: Iterable[str]) -> int:
    return math.ceil(max(map(font(_FONT).getlength, texts), default=0))


def _draw_upwards(draw: ImageDraw.ImageDraw, text: str, middle: float, bottom: float) -> None:
    """Draw `text` from bottom to top, starting at the pixel row `bottom` and centered on the pixel column `middle`."""
    from PIL import Image, ImageFont

    upwards = ImageFont.TransposedFont(font(_FONT), Image.Transpose.ROTATE_90)
    _, _, width, height = upwards.getbbox(text)
    draw.text((round(middle - width / 2), round(bottom - height)), text, _INK, upwards)


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


def _to_pillow(image: torch.Tensor, size: tuple[int, int] | None = None) -> Image.Image:
    """Convert a tensor, uint8 [1 or 3, height, width], to an RGB image, scaled to `size`, which is (width, height)."""
    from PIL import Image

    pixels = image.cpu().expand(3, -1, -1).permute(1, 2, 0).contiguous()
    picture = Image.frombytes("RGB", (image.shape[2], image.shape[1]), pixels.numpy().tobytes())
    return picture if size is None else picture.resize(size, Image.Resampling.BOX)


def to_tensor(canvas: Image.Image) -> torch.Tensor:
    """Convert an RGB image to a tensor, uint8 [3, height, width]."""
    pixels = torch.frombuffer(bytearray(canvas.tobytes()), dtype=torch.uint8)
    return pixels.view(canvas.height, canvas.width, 3).permute(2, 0, 1).contiguous()
