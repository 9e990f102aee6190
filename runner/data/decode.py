"""Decode an image file with Pillow, crop it, resize it with torch, whose kernels are three times as fast; normalize."""

from __future__ import annotations

import io
import math
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from runner.storage.files import open_regular

if TYPE_CHECKING:
    from PIL.Image import Image

_COMMON = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
_OTHERS = ("AVIF", "DDS", "DIB", "ICNS", "ICO", "JPEG2000", "PCX", "PSD", "QOI", "SGI", "SUN", "TGA", "XBM", "XPM")
FORMATS = (*_COMMON, *_OTHERS)
"""The formats that Pillow may decode, by itself and from files that a signature identifies, or, for TGA, their name.

Other formats are refused: for an EPS file, Pillow would start Ghostscript.
"""

MAX_BYTES = 256 * 2**20
"""The maximum size of a file in bytes. An image of more than 89,478,485 pixels is refused, too: Pillow warns of it."""

_ORIENTATION = 0x0112  # EXIF tag
_BITS_PER_SAMPLE, _PHOTOMETRIC, _WHITE_IS_ZERO = 0x0102, 0x0106, 0  # TIFF tags, and a value of the second


@dataclass(frozen=True)
class ImageReader:
    """A callable that reads an image file as an RGB image, uint8 [3, size, size].

    Training images are transformed if `augment` is `crop` (`RandomResizedCrop` of at least the fraction `least_area`,
    and `RandomHorizontalFlip` of torchvision) or `flip` (the latter alone). Without a random crop, `center` is the side
    of the center crop, as a fraction of the shorter side.
    """

    size: int
    augment: str
    least_area: float
    center: float

    def __call__(self, path: str, for_training: bool) -> torch.Tensor:
        """Return the image at `path`; if `for_training`, transformed with random numbers of torch's CPU generator.

        Raises an exception of any type if the file cannot be read.
        """
        from PIL import Image, UnidentifiedImageError  # config errors are reported before Pillow is imported

        # Links are followed, because data sets often consist of them. Pillow would read dozens of small blocks.
        with open_regular(Path(os.path.realpath(path, strict=True) if os.path.islink(path) else path)) as file:
            num_bytes = os.fstat(file.fileno()).st_size
            if num_bytes > MAX_BYTES:
                raise ValueError(f"it has {num_bytes:,} bytes, more than {MAX_BYTES:,}")
            content = io.BytesIO(file.read(num_bytes))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of EXIF data that is damaged
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            try:
                opened = Image.open(content, formats=_COMMON)
            except UnidentifiedImageError:
                opened = _other_format(content, os.path.splitext(path)[1].lower())
            with opened as image:
                square = self._scaled(image, for_training and self.augment == "crop")
        if for_training and self.augment != "none" and torch.rand(1) < 0.5:  # as RandomHorizontalFlip
            square = square.flip(2)
        return square

    def _scaled(self, image: Image, random_crop: bool) -> torch.Tensor:
        import numpy
        from PIL.JpegImagePlugin import JpegImageFile

        is_jpeg = isinstance(image, JpegImageFile)  # which is not decoded before the crop is known
        if not is_jpeg:
            image.load()  # before the EXIF data is read, which may follow the pixels
            image = _in_8_bits(_upright(image))
        width, height = image.size[::-1] if is_jpeg and _orientation(image) > 4 else image.size
        if random_crop:
            from torchvision.transforms import RandomResizedCrop  # evaluations do not need it

            whole = torch.empty(1, height, width, device="meta")
            top, left, box_height, box_width = RandomResizedCrop.get_params(
                whole, [self.least_area, 1.0], [3 / 4, 4 / 3]
            )
        else:
            box_width = box_height = max(1, round(self.center * min(width, height)))
            left, top = (width - box_width) // 2, (height - box_height) // 2
        if is_jpeg:
            # A lower resolution is many times faster. At twice the final size, the antialiasing filter of the final
            # resize still determines the quality.
            enough = 2 * self.size / min(box_width, box_height)
            if enough < 1:
                image.draft(None, (math.ceil(image.size[0] * enough), math.ceil(image.size[1] * enough)))  # pyright: ignore[reportArgumentType]
            image = _upright(image)
        shrunk = image.size[0] / width
        edges = (left, top, left + box_width, top + box_height)
        crop = image.crop([round(edge * shrunk) for edge in edges])  # pyright: ignore[reportArgumentType]
        if crop.mode != "RGB":  # not directly: a palette may be transparent
            crop = crop.convert("RGBA").convert("RGB")
        pixels = torch.from_numpy(numpy.array(crop)).permute(2, 0, 1)
        size = (self.size, self.size)
        return torch.nn.functional.interpolate(pixels[None], size, mode="bilinear", antialias=True)[0]


def _other_format(content: io.BytesIO, extension: str) -> Image:
    from PIL import Image, UnidentifiedImageError

    Image.init()  # loads more decoders, of which a version of Pillow may lack some
    named = Image.registered_extensions().get(extension)
    try:
        formats = [name for name in _OTHERS if name in Image.OPEN and (Image.OPEN[name][1] or name == named)]
        return Image.open(content, formats=formats)
    except UnidentifiedImageError:  # its message names the buffer, not the file
        raise ValueError(f"it is not an image in one of the formats {', '.join(FORMATS)}") from None


def _orientation(image: Image) -> int:
    """Return the orientation in the EXIF data, from 1 to 8, which swaps width and height if it is above 4."""
    try:
        value = image.getexif().get(_ORIENTATION, 1)
    except Exception:  # Pillow raises anything for damaged data
        return 1
    return int(value) if value in range(1, 9) else 1


def _upright(image: Image) -> Image:
    """Turn an image as its EXIF data says; `ImageOps.exif_transpose` fails to write odd values of other tags."""
    from PIL.Image import Transpose

    turns = (Transpose.FLIP_LEFT_RIGHT, Transpose.ROTATE_180, Transpose.FLIP_TOP_BOTTOM, Transpose.TRANSPOSE)
    turns += (Transpose.ROTATE_270, Transpose.TRANSVERSE, Transpose.ROTATE_90)
    orientation = _orientation(image)
    return image.transpose(turns[orientation - 2]) if orientation > 1 else image


def _in_8_bits(image: Image) -> Image:
    """Scale gray pixels of more than 8 bits to 8 bits; `Image.convert` would clip them."""
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


@dataclass(frozen=True)
class ImageInput:
    """The transform with which the evaluations of a run turn an image file into an input of the model.

    `shape` is (1 or 3 channels, side, side); `mean` and `std`, of each channel, are those of pixels in [0, 1]; `center`
    is the side of the central square that is resized, as a fraction of the image's shorter side.
    """

    shape: Sequence[int]
    mean: Sequence[float]
    std: Sequence[float]
    center: float

    def read(self, path: str) -> torch.Tensor:
        """Return the image in the file `path`, uint8 of the shape `shape`; raises anything if it cannot be read."""
        image = ImageReader(self.shape[1], "none", 1.0, self.center)(path, False)
        if self.shape[0] == 3:
            return image
        weights = per_channel((0.299, 0.587, 0.114))  # ITU-R BT.601, as in Pillow's mode L
        return (image * weights).sum(0, keepdim=True).round().to(torch.uint8)

    def normalized(self, images: torch.Tensor) -> torch.Tensor:
        """Convert images, uint8 [n, channels, height, width], to inputs of the model, float32 of the same shape."""
        return normalized(images, per_channel(self.mean), per_channel(self.std))


def per_channel(values: Sequence[float], device: torch.device | None = None) -> torch.Tensor:
    """Return one value for each channel, float32 [channels, 1, 1]."""
    return torch.tensor(values, device=device)[:, None, None]


def normalized(images: torch.Tensor, mean: torch.Tensor, std: torch.Tensor) -> torch.Tensor:
    """Return images, uint8 [n, channels, height, width], as float32 inputs; the others are from `per_channel`."""
    return images.to(torch.float32).div_(255).sub_(mean).div_(std)
