"""One image file, read, cut out and scaled to a square: what a worker does all day.

Decoded by Pillow, which reads every format and says when a file is damaged (torchvision's decoders are a little faster
on JPEG, read fewer formats, and are deprecated); scaled by torch, whose uint8 kernels are three times as fast as
Pillow's.
"""

from __future__ import annotations

import io
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from PIL.Image import Image

Box = tuple[int, int, int, int]
"""Left, top, right and bottom, in pixels; right and bottom are outside."""

_ORIENTATION = 0x0112  # the EXIF tag; 5 to 8 lie on their side
_ATTEMPTS = 10
_LOG_RATIO = math.log(4 / 3)


@dataclass(frozen=True)
class ImageReader:
    """Reads an image file as RGB, uint8 [3, size, size].

    Args:
        size: of a side, in pixels.
        augment: `crop` a random part of training images and mirror half of them, `flip` only mirror, or `none`.
        least_area: the smallest share of an image that a random part shows.
        centre: the side of the central square that is shown otherwise, as a share of the image's shorter side.
    """

    size: int
    augment: str
    least_area: float
    centre: float

    num_draws = 2 * _ATTEMPTS + 3

    def __call__(self, path: str, draws: list[float] | None) -> torch.Tensor:
        """The image at `path`, augmented as `draws` say (`num_draws` numbers in [0, 1)), or not at all if None.

        Raises:
            Exception: of many types, when it cannot be read.
        """
        # here, not above: the config's errors are told before it is loaded
        from PIL import Image, UnidentifiedImageError

        with open(path, "rb") as file:
            content = io.BytesIO(file.read())  # in one go: Pillow would read it in dozens of small pieces
        try:
            opened = Image.open(content)
        except UnidentifiedImageError:  # its message would name the buffer
            raise ValueError("it is no image in a format that Pillow knows") from None
        with opened as image:
            square = self._scaled(image, draws if self.augment == "crop" else None)
        return square.flip(2) if draws is not None and self.augment != "none" and draws[-1] < 0.5 else square

    def _scaled(self, image: Image, draws: list[float] | None) -> torch.Tensor:
        """The part of `image` that is to be shown, as a square."""
        orientation = image.getexif().get(_ORIENTATION, 1)
        width, height = image.size if orientation < 5 else image.size[::-1]
        if draws is None:
            box = central_box(width, height, self.centre)
        else:
            box = random_box(width, height, draws, self.least_area)
        part = _pixels(image, orientation, box, width, self.size)
        size = (self.size, self.size)
        return torch.nn.functional.interpolate(part[None], size, mode="bilinear", antialias=True)[0]


def central_box(width: int, height: int, share: float) -> Box:
    """The central square whose side is `share` of the shorter side."""
    side = max(1, round(share * min(width, height)))
    left, top = (width - side) // 2, (height - side) // 2
    return left, top, left + side, top + side


def random_box(width: int, height: int, draws: list[float], least_area: float) -> Box:
    """A part of random area and aspect ratio, anywhere (Szegedy et al., Going Deeper with Convolutions, 2015).

    As torchvision's `RandomResizedCrop`: area uniform in [least_area, 1], ratio log-uniform in [3/4, 4/3], ten attempts
    to find one that fits, else the largest central part with an allowed ratio; but decided by `draws` alone.
    """
    for share, ratio in zip(draws[0 : 2 * _ATTEMPTS : 2], draws[1 : 2 * _ATTEMPTS : 2], strict=True):
        area = width * height * (least_area + (1 - least_area) * share)
        root = math.exp((ratio - 0.5) * _LOG_RATIO)  # of the aspect ratio
        w, h = round(math.sqrt(area) * root), round(math.sqrt(area) / root)
        if 0 < w <= width and 0 < h <= height:
            left, top = int(draws[-3] * (width - w + 1)), int(draws[-2] * (height - h + 1))
            return left, top, left + w, top + h
    w, h = min(width, round(height * 4 / 3)), min(height, round(width * 4 / 3))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


def _pixels(image: Image, orientation: int, box: Box, width: int, size: int) -> torch.Tensor:
    """The pixels in `box`, uint8 [3, height, width]; fewer where that is still twice what `size` needs.

    Args:
        box: in the image as it is to be looked at, `width` pixels wide.
    """
    import numpy
    from PIL import ImageOps

    # JPEG can be decoded at a half, a quarter or an eighth of its size, many times faster. Twice the wanted size leaves
    # the rest of the scaling to a proper filter.
    enough = 2 * size / min(box[2] - box[0], box[3] - box[1])
    if enough < 1:
        image.draft(None, (math.ceil(image.size[0] * enough), math.ceil(image.size[1] * enough)))  # pyright: ignore[reportArgumentType]
    if orientation != 1:
        ImageOps.exif_transpose(image, in_place=True)
    shrunk = image.size[0] / width
    part = _as_rgb(image.crop([round(edge * shrunk) for edge in box]))  # pyright: ignore[reportArgumentType]
    return torch.from_numpy(numpy.array(part)).permute(2, 0, 1)


def _as_rgb(image: Image) -> Image:
    """`image` with 8 bits of red, green and blue, without transparency."""
    import numpy
    from PIL import Image

    if image.mode == "F":
        raise ValueError("its pixels are floating-point numbers, and no range is known")
    if image.mode.startswith("I"):  # 16 bits, which `convert` would clip to 8 instead of scaling them
        image = Image.fromarray((numpy.asarray(image) >> 8).clip(0, 255).astype(numpy.uint8))
    elif image.mode == "P":
        image = image.convert("RGBA")  # a palette may hold transparency, which goes to RGB only by this way
    return image if image.mode == "RGB" else image.convert("RGB")
