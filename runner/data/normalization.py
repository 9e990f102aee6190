"""Normalization of images: from bytes to float32, by the mean and the standard deviation of each channel."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def per_channel(values: Sequence[float], device: torch.device | None = None) -> torch.Tensor:
    """Return one value for each channel as a tensor that broadcasts with images: float32 [channels, 1, 1]."""
    return torch.tensor(values, device=device)[:, None, None]


def normalized(images: torch.Tensor, mean: torch.Tensor, std: torch.Tensor) -> torch.Tensor:
    """Return inputs of a network, float32 [n, channels, height, width].

    Args:
        images: uint8 [n, channels, height, width].
        mean: mean of each channel, for pixels in [0, 1], as `per_channel` returns it.
        std: standard deviation of each channel, in the same form.
    """
    return images.to(torch.float32).div_(255).sub_(mean).div_(std)
