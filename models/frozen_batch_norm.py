"""Batch normalization whose parameters are not trained, and whose running statistics do not change."""

from __future__ import annotations

import torch
from torch import nn


class FrozenBatchNorm(nn.Module):
    """Batch normalization with the running statistics, in training mode too: a fixed affine map of each channel.

    A layer whose weight and bias are frozen is converted by setting its `__class__`. This is not a subclass of torch's
    batch normalization, so that parallel modes do not synchronize or average its statistics.
    """

    weight: torch.Tensor
    bias: torch.Tensor
    running_mean: torch.Tensor
    running_var: torch.Tensor
    eps: float

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return nn.functional.batch_norm(
            input, self.running_mean, self.running_var, self.weight, self.bias, training=False, eps=self.eps
        )
