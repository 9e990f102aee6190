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

    def too_slow(self, num_steps: int) -> str:
        """Return a warning if `decay` is too large for a run of `num_steps` steps; otherwise, return "".

        After the last step, the weights after the first step have a share of decay^(num_steps − 1) in the average.
        """
        share = 0.0 if self.decay is None else self.decay ** (num_steps - 1)
        if share < 0.1:
            return ""
        window = max(2.0, num_steps / 10)
        return (
            f"ema.decay={self.decay} is too large for {num_steps:,} steps: {share:.0%} of the last average are the "
            f"weights after the first step; ema.decay={1 - 1 / window:.4g} averages over about {window:.0f} steps"
        )
