"""Decode, crop and resize an image file.

Images are decoded by Pillow, which supports more formats than torchvision and detects damaged files (the decoders of
torchvision are slightly faster for JPEG, but deprecated). Images are resized by torch, whose uint8 kernels are three
times as fast as Pillow's.
"""

from __future__ import annotations

import io
import math
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from runner.data.safe_file import read_regular_file

if TYPE_CHECKING:
    from PIL.Image import Image

Box = tuple[int, int, int, int]
"""Left, top, right and bottom in pixels; right and bottom are exclusive."""

FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""The formats that Pillow may decode. Other formats are refused: for an EPS file, Pillow would start Ghostscript."""

LIMIT_BYTES = 256 * 2**20
"""The maximum size of a file in bytes.

Because a small file may have many pixels, `ImageReader` also refuses images with more than 89,478,485 pixels, which is
the number at which Pillow warns.
"""

_ORIENTATION, _SWAPPED = 0x0112, (5, 6, 7, 8)  # EXIF tag, and its values that swap width and height
_BITS_PER_SAMPLE, _PHOTOMETRIC, _WHITE_IS_ZERO = 0x0102, 0x0106, 0  # TIFF tags, and a value of the second
_ATTEMPTS = 10
_LOG_RATIO = math.log(4 / 3)


@dataclass(frozen=True)
class ImageReader:
    """A callable that reads an image file as an RGB image, uint8 [3, size, size].

    Args:
        size: height and width of the returned images in pixels.
        augment: transforms of training images: `crop` (random resized crop and random flip), `flip` (random flip) or
            `none`.
        least_area: the smallest fraction of the image area that a random crop covers.
        centre: side of the center crop, as a fraction of the image's shorter side. The center crop is used whenever no
            random crop is used.
    """

    size: int
    augment: str
    least_area: float
    centre: float

    num_draws = 2 * _ATTEMPTS + 3

    def __call__(self, path: str, draws: list[float] | None) -> torch.Tensor:
        """Return the image at `path`.

        Args:
            path: path of the file.
            draws: `num_draws` uniform random numbers in [0, 1) for the augmentation; None for no augmentation.

        Raises:
            Exception: an exception of any type, if the file cannot be read.
        """
        # imported here: config errors are reported before Pillow is imported
        from PIL import Image, UnidentifiedImageError

        content = io.BytesIO(read_regular_file(path, LIMIT_BYTES))  # Pillow reads files in dozens of small blocks
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", Image.DecompressionBombWarning)
                opened = Image.open(content, formats=FORMATS)
        except UnidentifiedImageError:  # its message names the buffer, not the file
            raise ValueError(f"it is not an image in one of the formats {', '.join(FORMATS)}") from None
        with opened as image:
            square = self._scaled(image, draws if self.augment == "crop" else None)
        return square.flip(2) if draws is not None and self.augment != "none" and draws[-1] < 0.5 else square

    def _scaled(self, image: Image, draws: list[float] | None) -> torch.Tensor:
        """Crop `image`, and resize the crop to a square. The crop is random if `draws` is given, otherwise central.

        A JPEG is decoded at 1/2, 1/4 or 1/8 of its resolution if this leaves the crop at least twice as large as the
        square.
        """
        import numpy
        from PIL import ImageOps
        from PIL.JpegImagePlugin import JpegImageFile

        if is_jpeg := isinstance(image, JpegImageFile):  # not decoded before the crop is known
            swapped = image.getexif().get(_ORIENTATION) in _SWAPPED
            width, height = image.size[::-1] if swapped else image.size
        else:
            ImageOps.exif_transpose(image, in_place=True)
            image = _in_8_bits(image)
            width, height = image.size
        if draws is None:
            box = central_box(width, height, self.centre)
        else:
            box = random_box(width, height, draws, self.least_area)
        if is_jpeg:
            # A lower resolution is many times faster. At twice the final size, the antialiasing filter of the final
            # resize still determines the quality.
            enough = 2 * self.size / min(box[2] - box[0], box[3] - box[1])
            if enough < 1:
                image.draft(None, (math.ceil(image.size[0] * enough), math.ceil(image.size[1] * enough)))  # pyright: ignore[reportArgumentType]
            ImageOps.exif_transpose(image, in_place=True)
        shrunk = image.size[0] / width
        crop = _as_rgb(image.crop([round(edge * shrunk) for edge in box]))  # pyright: ignore[reportArgumentType]
        pixels = torch.from_numpy(numpy.array(crop)).permute(2, 0, 1)
        size = (self.size, self.size)
        return torch.nn.functional.interpolate(pixels[None], size, mode="bilinear", antialias=True)[0]


def central_box(width: int, height: int, share: float) -> Box:
    """Return a square in the center of an image. The side of the square is `share` times the image's shorter side."""
    side = max(1, round(share * min(width, height)))
    left, top = (width - side) // 2, (height - side) // 2
    return left, top, left + side, top + side


def random_box(width: int, height: int, draws: list[float], least_area: float) -> Box:
    """Return a box of random area, aspect ratio and position (Szegedy et al., Going Deeper with Convolutions, 2015).

    Boxes are distributed as in torchvision's `RandomResizedCrop`: the area, as a fraction of the image's, is uniform
    in [least_area, 1], and the aspect ratio is log-uniform in [3/4, 4/3]. If none of ten attempts gives a box that
    fits, the largest central box with an allowed aspect ratio is returned. Unlike in torchvision, the box depends only
    on the arguments.

    Args:
        width: width of the image in pixels.
        height: height of the image in pixels.
        draws: `ImageReader.num_draws` uniform random numbers in [0, 1).
        least_area: the smallest area of a random box, as a fraction of the image's; the central box may be smaller.
    """
    for share, ratio in zip(draws[0 : 2 * _ATTEMPTS : 2], draws[1 : 2 * _ATTEMPTS : 2], strict=True):
        area = width * height * (least_area + (1 - least_area) * share)
        root = math.exp((ratio - 0.5) * _LOG_RATIO)  # square root of the aspect ratio
        w, h = round(math.sqrt(area) * root), round(math.sqrt(area) / root)
        if 0 < w <= width and 0 < h <= height:
            left, top = int(draws[-3] * (width - w + 1)), int(draws[-2] * (height - h + 1))
            return left, top, left + w, top + h
    w, h = min(width, round(height * 4 / 3)), min(height, round(width * 4 / 3))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


def _in_8_bits(image: Image) -> Image:
    """Scale gray pixels of more than 8 bits to 8 bits; `Image.convert` would clip them.

    Raises:
        ValueError: if the value of white is unknown.
    """
    import numpy
    from PIL import Image

    tags = getattr(image, "tag_v2", {})  # of a TIFF file
    if image.mode == "F" or (image.mode == "I" and tags):
        kind = "floating-point numbers" if image.mode == "F" else "integers of 32 bits, or signed"
        raise ValueError(f"its pixels are {kind}, and the value of white is unknown: convert it to 8 or 16 bits")
    if not image.mode.startswith("I"):
        return image
    pixels = numpy.asarray(image) >> (tags.get(_BITS_PER_SAMPLE, (16,))[0] - 8)
    if tags.get(_PHOTOMETRIC) == _WHITE_IS_ZERO:  # Pillow inverts the pixels of 8 bits only
        pixels = 255 - pixels
    return Image.fromarray(pixels.astype(numpy.uint8))


def _as_rgb(image: Image) -> Image:
    """Convert an image of 8 bits to RGB without an alpha channel."""
    if image.mode == "P":
        image = image.convert("RGBA")  # a palette with transparency cannot be converted to RGB directly
    return image if image.mode == "RGB" else image.convert("RGB")
