"""Pictures for TensorBoard: images with captions, and a confusion matrix; uint8 tensors [3, height, width] on the CPU.

Drawn with Pillow, which comes with torchvision and brings its own font: no plotting library, no system fonts.
"""

from __future__ import annotations

import functools
import io
import math
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

# Pillow is imported inside the functions: a run that draws nothing, or fails on its config, does not load it.
if TYPE_CHECKING:
    from PIL import Image, ImageFont

GOOD, BAD, PLAIN = (20, 110, 60), (185, 35, 45), (90, 90, 90)
"""The colour of a caption's strip: right, wrong, and neither said."""

_WHITE, _INK = (255, 255, 255), (40, 40, 40)
_DARKEST = (8, 48, 107)
_GAP, _STRIP, _FONT = 4, 18, 12
_UNITS = ((10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k"))
_SPELLED = str.maketrans({"→": "->", "–": "-", "×": "x", "ß": "ss", "æ": "ae", "ø": "o", "ł": "l"})


def gif(frames: torch.Tensor, seconds: float = 0.04) -> bytes:
    """A film as an endless GIF.

    Args:
        frames: uint8 [n, 3, height, width].
        seconds: how long each is shown.
    """
    from PIL import Image

    first, *rest = (Image.fromarray(frame.permute(1, 2, 0).contiguous().numpy()) for frame in frames)
    buffer = io.BytesIO()
    first.save(buffer, "GIF", save_all=True, append_images=rest, duration=round(1000 * seconds), loop=0)
    return buffer.getvalue()


def grid(images: torch.Tensor, captions: Sequence[str], good: Sequence[bool] | None = None) -> torch.Tensor:
    """Images in as many rows as columns, each with a caption below.

    Small images are scaled up by a whole number until their longer side has 64 pixels, large ones down to 160.

    Args:
        images: uint8 [n, 1 or 3, height, width].
        captions: n of them, cut off where they are wider than the image.
        good: whether each is right, which colours its caption green or red; None: grey.

    Returns:
        uint8 [3, height, width].
    """
    from PIL import Image, ImageDraw

    colours = [PLAIN] * len(images) if good is None else [GOOD if right else BAD for right in good]
    width, height = _tile_size(images.shape[3], images.shape[2])
    cell_width, cell_height = width + _GAP, height + _STRIP + _GAP
    columns = max(1, math.ceil(math.sqrt(len(images))))
    rows = max(1, math.ceil(len(images) / columns))
    canvas = Image.new("RGB", (columns * cell_width + _GAP, rows * cell_height + _GAP), _WHITE)
    draw = ImageDraw.Draw(canvas)
    scaling = Image.Resampling.NEAREST if width >= images.shape[3] else Image.Resampling.BOX
    for i, (image, caption, colour) in enumerate(zip(images, captions, colours, strict=True)):
        left, top = _GAP + i % columns * cell_width, _GAP + i // columns * cell_height
        canvas.paste(_to_pillow(image).resize((width, height), scaling), (left, top))
        draw.rectangle((left, top + height, left + width - 1, top + height + _STRIP - 1), colour)
        place = (left + width / 2, top + height + _STRIP / 2)
        draw.text(place, _fitting(caption, width - 4, _FONT), _WHITE, font(_FONT), anchor="mm")
    return to_tensor(canvas)


def confusion_matrix(counts: torch.Tensor, class_names: Sequence[str]) -> torch.Tensor:
    """How often samples of each class (rows) were taken for each class (columns).

    A cell is the darker, the larger its share of its row; by the root of it, so that rare mistakes show. Up to 20
    classes have their names and counts written; more are drawn as a heat map of at most 1000 cells a side, in which
    neighbouring classes share a cell where there are more.

    Args:
        counts: int64 [classes, classes], on any device.

    Returns:
        uint8 [3, height, width].
    """
    assert len(counts) == len(class_names), f"{len(counts)} classes, {len(class_names)} names"
    counts = counts.cpu()
    return _with_numbers(counts, class_names) if len(counts) <= 20 else _heat_map(counts)


def shades(counts: torch.Tensor) -> torch.Tensor:
    """The colours of a confusion matrix's cells: white for none of its row, dark blue for all.

    Args:
        counts: int64 [classes, classes].

    Returns:
        uint8 [3, classes, classes].
    """
    white, darkest = (torch.tensor(colour)[:, None, None] for colour in (_WHITE, _DARKEST))
    return (white + (darkest - white) * _row_shares(counts).sqrt()).round().to(torch.uint8)


def _row_shares(counts: torch.Tensor) -> torch.Tensor:
    return counts / counts.sum(1, keepdim=True).clamp(min=1)  # a class without samples has no shares


def _with_numbers(counts: torch.Tensor, class_names: Sequence[str]) -> torch.Tensor:
    from PIL import Image, ImageDraw

    num_classes, cell, widest = len(counts), 44, 110
    names = [_fitting(name, widest, _FONT) for name in class_names]
    margin = 30 + math.ceil(max(font(_FONT).getlength(name) for name in names))
    size = margin + num_classes * cell + _GAP
    canvas = Image.new("RGB", (size, size), _WHITE)
    canvas.paste(_scaled(shades(counts), cell), (margin, margin))
    draw = ImageDraw.Draw(canvas)
    shares = _row_shares(counts).tolist()
    for i, row in enumerate(counts.tolist()):
        middle = margin + (i + 0.5) * cell
        draw.text((margin - 6, middle), names[i], _INK, font(_FONT), anchor="rm")
        _draw_upwards(canvas, names[i], round(middle), margin - 6)
        for j, count in enumerate(row):
            colour = _WHITE if shares[i][j] > 0.25 else _INK  # half of the way to the darkest blue
            draw.text((margin + (j + 0.5) * cell, middle), _short(count), colour, font(_FONT), anchor="mm")
    return _framed(canvas, margin, num_classes * cell)


def _heat_map(counts: torch.Tensor) -> torch.Tensor:
    from PIL import Image, ImageDraw

    num_classes = len(counts)
    share = math.ceil(num_classes / 1000)
    counts = _merged(_merged(counts, share).T, share).T
    cell, margin = max(1, 800 // len(counts)), 56
    extent = cell * len(counts)
    canvas = Image.new("RGB", (margin + extent + _GAP, margin + extent + _GAP), _WHITE)
    canvas.paste(_scaled(shades(counts), cell), (margin, margin))
    draw = ImageDraw.Draw(canvas)
    for number, place, across, down in ((0, margin, "l", "t"), (num_classes - 1, margin + extent, "r", "b")):
        draw.text((place, margin - 6), str(number), _INK, font(_FONT), anchor=f"{across}s")
        draw.text((margin - 6, place), str(number), _INK, font(_FONT), anchor=f"r{down}")
    return _framed(canvas, margin, extent)


def _merged(counts: torch.Tensor, share: int) -> torch.Tensor:
    """`counts` with each `share` neighbouring rows added up."""
    padding = -len(counts) % share
    return torch.nn.functional.pad(counts, (0, 0, 0, padding)).unflatten(0, (-1, share)).sum(1)


def _framed(canvas: Image.Image, margin: int, extent: int) -> torch.Tensor:
    """A line around the cells, and the titles of the two axes."""
    from PIL import ImageDraw

    draw = ImageDraw.Draw(canvas)
    draw.rectangle((margin - 1, margin - 1, margin + extent, margin + extent), outline=_INK)
    draw.text((margin + extent / 2, 4), "predicted", _INK, font(_FONT + 1), anchor="mt")
    _draw_upwards(canvas, "true", 10, round(margin + extent / 2), _FONT + 1)
    return to_tensor(canvas)


def save(picture: torch.Tensor, path: Path) -> None:
    """Write an RGB image, uint8 [3, height, width], as PNG."""
    _to_pillow(picture).save(path, "PNG")


def _draw_upwards(canvas: Image.Image, text: str, middle: int, bottom: int, size: int = _FONT) -> None:
    """Write `text` from below to above: centred on the column `middle`, ending at the row `bottom`."""
    from PIL import Image, ImageDraw

    label = Image.new("RGB", (math.ceil(font(size).getlength(text)) + 2, size + 6), _WHITE)
    ImageDraw.Draw(label).text((1, label.height / 2), text, _INK, font(size), anchor="lm")
    label = label.transpose(Image.Transpose.ROTATE_90)
    canvas.paste(label, (middle - label.width // 2, bottom - label.height))


def _tile_size(width: int, height: int) -> tuple[int, int]:
    longer = max(width, height)
    if longer > 160:
        return max(1, round(width * 160 / longer)), max(1, round(height * 160 / longer))
    factor = max(1, math.ceil(64 / longer))
    return width * factor, height * factor


def _fitting(text: str, width: int, size: int) -> str:
    """`text` on one line, cut off with an ellipsis where it is wider than `width` pixels."""
    text = _drawable(text)
    if font(size).getlength(text) <= width:
        return text
    text = text[:width]  # no letter is narrower than a pixel: the rest would only take time
    while text and font(size).getlength(text + "…") > width:
        text = text[:-1]
    return text + "…"


def _drawable(text: str) -> str:
    """`text` on one line, in what the font has: letters without their accents; what else it lacks becomes a box."""
    text = unicodedata.normalize("NFKD", " ".join(text.translate(_SPELLED).split()))
    return "".join(letter for letter in text if not unicodedata.combining(letter))


def _short(count: int) -> str:
    """A count in at most four characters."""
    if count < 10_000:
        return str(count)
    unit, letter = next((unit, letter) for unit, letter in _UNITS if count >= unit)
    return f"{count * 10 // unit / 10:.1f}{letter}" if count < 10 * unit else f"{count // unit}{letter}"


@functools.cache
def font(size: int) -> ImageFont.FreeTypeFont:
    from PIL import ImageFont

    font = ImageFont.load_default(size)
    assert isinstance(font, ImageFont.FreeTypeFont), "a font with a size is a FreeType font"
    return font


def _scaled(image: torch.Tensor, factor: int) -> Image.Image:
    from PIL import Image

    return _to_pillow(image).resize((image.shape[2] * factor, image.shape[1] * factor), Image.Resampling.NEAREST)


def _to_pillow(image: torch.Tensor) -> Image.Image:
    """uint8 [1 or 3, height, width] as an RGB image."""
    from PIL import Image

    pixels = image.cpu().expand(3, -1, -1).permute(1, 2, 0).contiguous()
    return Image.frombytes("RGB", (image.shape[2], image.shape[1]), pixels.numpy().tobytes())


def to_tensor(canvas: Image.Image) -> torch.Tensor:
    pixels = torch.frombuffer(bytearray(canvas.tobytes()), dtype=torch.uint8)
    return pixels.view(canvas.height, canvas.width, 3).permute(2, 0, 1).contiguous()
