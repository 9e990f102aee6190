"""The transform that turns image files into inputs of the model in evaluations. It is saved with the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from runner.data.decode import ImageReader

_GRAY = (0.299, 0.587, 0.114)
"""The weights of red, green and blue in a gray value (ITU-R BT.601), as in Pillow's mode L."""


@dataclass(frozen=True)
class ImageInput:
    """The transform with which the evaluations of a run turn an image file into an input of the model.

    Args:
        shape: (channels, side, side) of an input; 1 channel is gray, 3 are RGB.
        mean: mean of each channel, for pixels in [0, 1]; it is subtracted.
        std: standard deviation of each channel, for pixels in [0, 1]; normalization divides by it.
        center: side of the central square that is resized, as a fraction of the image's shorter side.
    """

    shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    center: float = 1.0

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> ImageInput:
        shape, mean, std = (tuple(values[key]) for key in ("shape", "mean", "std"))
        return ImageInput(shape, mean, std, values["center"])

    def read(self, path: str) -> torch.Tensor:
        """Return the image in the file `path`, uint8 of the shape `shape`; raises anything if it cannot be read."""
        image = ImageReader(self.shape[1], "none", 1.0, self.center)(path, False)
        if self.shape[0] == 3:
            return image
        return (image * per_channel(_GRAY)).sum(0, keepdim=True).round().to(torch.uint8)

    def normalized(self, images: torch.Tensor) -> torch.Tensor:
        """Convert images, uint8 [n, channels, height, width], to inputs of the model, float32 of the same shape."""
        return normalized(images, per_channel(self.mean), per_channel(self.std))


def per_channel(values: Sequence[float], device: torch.device | None = None) -> torch.Tensor:
    """Return one value for each channel, float32 [channels, 1, 1]."""
    return torch.tensor(values, device=device)[:, None, None]


def normalized(images: torch.Tensor, mean: torch.Tensor, std: torch.Tensor) -> torch.Tensor:
    """Return images, uint8 [n, channels, height, width], as float32 inputs; the others are from `per_channel`."""
    return images.to(torch.float32).div_(255).sub_(mean).div_(std)
