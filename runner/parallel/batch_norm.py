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
    """Convert the batch normalization layers in `model` so that they normalize over all processes, and return `model`.

    They become `torch.nn.SyncBatchNorm`, or the class in this file on a CPU, which torch's does not support.
    """
    if device.type != "cpu":
        return torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.__class__ = SyncBatchNorm  # in place: keeps parameters, buffers and their names
    return model


class BatchNormOfAnyDim(_BatchNorm):
    """Batch normalization (Ioffe and Szegedy, 2015) of inputs [n, channels, …]; subclasses compute the statistics."""

    def _check_input_dim(self, input: torch.Tensor) -> None:
        pass  # any

    @torch.no_grad()
    def update_running_stats(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        """Update the running statistics as `_BatchNorm` does, with a mean and an unbiased variance, [channels]."""
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked += 1
        share = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(variance.to(self.running_var.dtype), share)


class SyncBatchNorm(BatchNormOfAnyDim):
    """Batch normalization over the equal shards of all processes, with differentiable all-reduces."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return super().forward(input)
        x = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
        others = [dim for dim in range(x.dim()) if dim != 1]
        shape = [1, -1] + [1] * (x.dim() - 2)
        count = x.numel() // x.size(1) * torch.distributed.get_world_size()  # all shards have the same size
        # Two passes, as in one process: the mean of squares minus the squared mean suffers from cancellation.
        mean = _sum_over_ranks(x.sum(others)) / count
        centered = x - mean.view(shape)
        variance = _sum_over_ranks(centered.square().sum(others)) / count
        self.update_running_stats(mean, variance * (count / max(1, count - 1)))
        normalized = centered * torch.rsqrt(variance + self.eps).view(shape)
        if self.affine:
            normalized = normalized * self.weight.view(shape) + self.bias.view(shape)
        return normalized.to(input.dtype)


class _AllReduceSum(torch.autograd.Function):
    """A differentiable all-reduce: the backward pass sums the gradients of all ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        total = tensor.contiguous().clone()
        torch.distributed.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _sum_over_ranks(gradient)


_sum_over_ranks: Any = _AllReduceSum.apply
if torch.__version__ < "2.14":  # compiled by torch 2.11, the all-reduces give wrong sums; 2.14 was found to be right
    _sum_over_ranks = torch.compiler.disable(_sum_over_ranks)


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
        self.update_running_stats(self.seen_mean, self.seen_squares / (self.seen - 1).clamp(min=1))
        for buffer in (self.seen, self.seen_mean, self.seen_squares):
            buffer.zero_()
