"""Batch normalization over parts of a batch: its shards on several processes, or its micro-batches in a pipeline.

`SyncBatchNorm` normalizes with the statistics of all shards. `DeferredBatchNorm` normalizes with those of each
micro-batch, but its running statistics, which evaluation uses, are those of the whole batch, exactly up to rounding
(Huang et al., GPipe, 2019, section 2.2; Kim et al., torchgpipe, 2020; Chan, Golub and LeVeque, 1979).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm


def convert_sync_batch_norm(model: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """Let batch normalization in `model` normalize over all processes, and return `model`; torch's needs a GPU."""
    if device.type != "cpu":
        return torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.__class__ = SyncBatchNorm  # in place: keeps parameters, buffers and their names
    return model


class BatchNormOfAnyDim(_BatchNorm):
    """Batch normalization (Ioffe and Szegedy, 2015) of inputs [n, channels, …]."""

    def _check_input_dim(self, input: torch.Tensor) -> None:
        pass  # any


class SyncBatchNorm(BatchNormOfAnyDim):
    """Batch normalization over the shards of all processes, of equal size, which each process gathers."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        from torch.distributed.nn.functional import all_gather  # differentiable: it sums the gradients of all ranks

        if not self.training:
            return super().forward(input)
        start = torch.distributed.get_rank() * len(input)
        return super().forward(torch.cat(all_gather(input)))[start : start + len(input)]


def defer(model: torch.nn.Module) -> None:
    """Convert the batch normalization layers in `model` so that only `update` changes their running statistics."""
    for module in model.modules():
        if isinstance(module, _BatchNorm) and module.track_running_stats:
            module.__class__ = DeferredBatchNorm  # in place: keeps parameters, buffers and their names
            mean: Any = module.running_mean
            # Buffers, so that a recomputed forward pass (models.layers) does not count twice.
            for name, like in (("seen", mean.new_zeros(())), ("seen_mean", mean), ("seen_squares", mean)):
                module.register_buffer(name, torch.zeros_like(like), persistent=False)


def update(model: torch.nn.Module) -> None:
    """Update the running statistics in `model` with those of a whole batch, after its last micro-batch."""
    for module in model.modules():
        if isinstance(module, DeferredBatchNorm):
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
        # With a momentum of one, torch's kernel returns the statistics of the micro-batch, without a second pass.
        mean, variance = torch.zeros_like(self.seen_mean), torch.zeros_like(self.seen_squares)
        output = torch.nn.functional.batch_norm(input, mean, variance, self.weight, self.bias, True, 1.0, self.eps)
        count = input.numel() // input.size(1)
        total, distance = self.seen + count, mean - self.seen_mean
        self.seen_mean += distance * (count / total)
        self.seen_squares += variance * (count - 1) + distance.square() * (self.seen * count / total)
        self.seen += count
        return output

    @torch.no_grad()
    def update(self) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return  # a stage of another process
        self.num_batches_tracked += 1
        share = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(self.seen_mean.to(self.running_mean.dtype), share)
        variance = self.seen_squares / (self.seen - 1).clamp(min=1)
        self.running_var.lerp_(variance.to(self.running_var.dtype), share)
        for buffer in (self.seen, self.seen_mean, self.seen_squares):
            buffer.zero_()
