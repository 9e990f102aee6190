"""The options of the average of the weights. Evaluations use the average; checkpoints hold it beside the weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from runner.config.errors import check_range
from runner.ema.base import Average

if TYPE_CHECKING:
    import torch


@dataclass
class Ema:
    """An exponential moving average of the weights (Polyak averaging; Tarvainen and Valpola, Mean Teacher, 2017).

    It is equivalent to `torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))`: the
    average begins with the weights after the first step; buffers, such as the running statistics of batch
    normalization, are not averaged. Evaluations use the averaged weights with the model's own buffers, so the best
    checkpoint is the one whose averaged weights evaluate best.

    Args:
        decay: weight of the previous average in each update, above 0 and below 1; None for no average.
    """

    decay: float | None = None

    def __post_init__(self) -> None:
        check_range(self, "decay", above=0, below=1)

    def build(self, model: torch.nn.Module) -> Average:
        """Return the average for `model`, which the parallel mode has placed.

        If `decay` is None, the returned average has no effect.
        """
        if self.decay is None:
            return Average()
        from runner.ema.moving_average import MovingAverage  # imported here, because it imports torch

        return MovingAverage(model, self.decay)
