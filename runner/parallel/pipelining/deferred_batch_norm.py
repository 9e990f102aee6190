"""Batch normalization over micro-batches, with the running statistics of the whole batch.

Huang et al., GPipe (2019), section 2.2: training uses the statistics of each micro-batch, and evaluation uses running
statistics of whole batches. Kim et al., torchgpipe (2020), call this deferred batch normalization. The mean and the
variance of a whole batch are computed from the means and variances of its micro-batches, exactly up to rounding (Chan,
Golub and LeVeque, 1979).
"""

from __future__ import annotations

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from runner.parallel.sync_batch_norm import BatchNormOfAnyDim


def defer(model: torch.nn.Module) -> None:
    """Convert the batch normalization layers in `model` so that only `update` changes their running statistics."""
    for module in model.modules():
        if isinstance(module, _BatchNorm) and module.track_running_stats:
            module.__class__ = DeferredBatchNorm  # in place: keeps parameters, buffers and their names
            assert isinstance(module, DeferredBatchNorm)
            assert module.running_mean is not None
            # Buffers, so that a recomputed forward pass (models.recompute) does not count twice.
            mean = module.running_mean
            for name, like in (("seen", mean.new_zeros(())), ("seen_mean", mean), ("seen_squares", mean)):
                module.register_buffer(name, torch.zeros_like(like), persistent=False)


def update(model: torch.nn.Module) -> None:
    """Update the running statistics in `model` with those of a whole batch, after its last micro-batch."""
    for module in model.modules():
        # Stages of other processes have no statistics in this one.
        if isinstance(module, DeferredBatchNorm) and module.running_mean is not None:
            module.update()


class DeferredBatchNorm(BatchNormOfAnyDim):
    """Batch normalization that changes its running statistics only in `update`; for inputs [n, channels, …].

    Between updates, the buffers collect the statistics of all micro-batches: the number of values per channel, their
    mean, and the sum of their squared deviations from the mean.
    """

    seen: torch.Tensor
    seen_mean: torch.Tensor
    seen_squares: torch.Tensor

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        # With a momentum of one, torch's kernel returns the statistics of the micro-batch, without a second pass.
        mean, variance = torch.zeros_like(self.seen_mean), torch.zeros_like(self.seen_squares)
        output = torch.nn.functional.batch_norm(input, mean, variance, self.weight, self.bias, True, 1.0, self.eps)
        self._merge(mean, variance, input.numel() // input.size(1))
        return output

    @torch.no_grad()
    def _merge(self, mean: torch.Tensor, variance: torch.Tensor, count: int) -> None:
        total = self.seen + count
        distance = mean - self.seen_mean
        self.seen_mean += distance * (count / total)
        self.seen_squares += variance * (count - 1) + distance.square() * (self.seen * count / total)
        self.seen += count

    @torch.no_grad()
    def update(self) -> None:
        self.update_running_stats(self.seen_mean, self.seen_squares / (self.seen - 1).clamp(min=1))
        for buffer in (self.seen, self.seen_mean, self.seen_squares):
            buffer.zero_()
