"""Batch normalization over parts of a batch: its shards on several processes, or its micro-batches in a pipeline.

Synchronized layers normalize with the statistics of all shards. Deferred ones normalize with those of each micro-batch,
but their running statistics, which evaluation uses, are those of the whole batch, exactly up to rounding (Huang et al.,
GPipe, 2019, section 2.2; Kim et al., torchgpipe, 2020; Chan, Golub and LeVeque, 1979).

A converted layer keeps its class, as a base class, and its forward pass, in which only the call of
`torch.nn.functional.batch_norm` is replaced: timm's `BatchNormAct2d`, for example, applies its activation besides.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import batch_norm
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from runner.config.errors import ConfigError
from runner.models.layers import FrozenStatistics

Arithmetic = Callable[..., torch.Tensor]
"""A function of a layer and of the arguments of `torch.nn.functional.batch_norm`, in the order of the latter."""

_EXACT = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def convert_sync_batch_norm(model: nn.Module, device: torch.device, kind: type[nn.Module] = _BatchNorm) -> None:
    """Convert the layers of `kind` in `model` so that they normalize over all processes.

    Those of torch itself become `torch.nn.SyncBatchNorm`, except on a CPU, which that does not support.

    Raises:
        ConfigError: if a layer cannot be converted: for one with a forward pass of its own, in its first one.
    """
    for layer in _layers(model):
        if device.type != "cpu" and type(layer) in _EXACT:
            layer.__class__, layer.process_group = nn.SyncBatchNorm, None  # in place: keeps what is attached to it
        elif isinstance(layer, kind) and (device.type == "cpu" or not isinstance(layer, nn.SyncBatchNorm)):
            _convert(layer, _synchronized, ("parallel.sync_batch_norm", True))


def defer(model: nn.Module) -> None:
    """Convert the batch normalization layers in `model` so that only `update` changes their running statistics.

    Raises `ConfigError` as `convert_sync_batch_norm`.
    """
    for layer in _layers(model):
        if layer.track_running_stats:
            _convert(layer, _deferred, ("parallel.batch_norm", "defer"))
            mean = layer.running_mean
            # Buffers, so that a recomputed forward pass (`runner.models.layers`) does not count twice.
            for name, like in (("seen", mean.new_zeros(())), ("seen_mean", mean), ("seen_squares", mean)):
                layer.register_buffer(name, torch.zeros_like(like), persistent=False)


@torch.no_grad()
def update(model: nn.Module) -> None:
    """Update the running statistics in `model` with those of a whole batch, after its last micro-batch."""
    for layer in model.modules():
        # Stages of other processes have no statistics in this one.
        if isinstance(layer, _BatchNorm) and hasattr(layer, "seen_mean") and layer.running_mean is not None:
            _update(layer)


def _update(layer: Any) -> None:
    layer.num_batches_tracked += 1
    share = 1 / float(layer.num_batches_tracked) if layer.momentum is None else layer.momentum
    variance = layer.seen_squares / (layer.seen - 1).clamp(min=1)
    for running, seen in ((layer.running_mean, layer.seen_mean), (layer.running_var, variance)):
        running.lerp_(seen.to(running.dtype), share)
    for buffer in (layer.seen, layer.seen_mean, layer.seen_squares):
        buffer.zero_()


def _layers(model: nn.Module) -> list[Any]:
    return [each for each in model.modules() if isinstance(each, _BatchNorm) and not isinstance(each, FrozenStatistics)]


def _convert(layer: nn.Module, arithmetic: Arithmetic, option: tuple[str, Any]) -> None:
    """Let the forward pass of `layer` call `arithmetic` in training mode, where it calls `batch_norm`."""
    if "forward" in vars(layer):
        raise _refused(layer, "its forward pass is that of the object, and not of its class", option)
    layer.__class__ = _converted(type(layer), arithmetic, option)


@functools.cache
def _converted(cls: type[nn.Module], arithmetic: Arithmetic, option: tuple[str, Any]) -> type[nn.Module]:
    # torch's SyncBatchNorm refuses a CPU.
    own: Any = _BatchNorm.forward if cls.forward is nn.SyncBatchNorm.forward else cls.forward

    def forward(layer: Any, *args: Any, **kwargs: Any) -> Any:
        if not layer.training:
            return own(layer, *args, **kwargs)
        tracked = layer.num_batches_tracked if arithmetic is _deferred else None
        before = None if tracked is None else tracked.clone()
        with _Replaced(layer, arithmetic) as replaced:
            outputs = own(layer, *args, **kwargs)
        sizes = [each.numel() for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
        if replaced.sizes != sizes[:1]:
            why = "its forward pass does not call torch.nn.functional.batch_norm once, on all of its input"
            raise _refused(layer, why, option)
        if tracked is not None:
            tracked.copy_(before)
        return outputs

    return type(cls.__name__, (cls,), {"forward": forward})


def _refused(layer: nn.Module, why: str, option: tuple[str, Any]) -> ConfigError:
    why = f"a layer {type(layer).__name__} of the network cannot be converted: {why}"
    return ConfigError(*option, why, f"leave out {option[0]}, or take torch.nn.BatchNorm2d for the layer")


class _Replaced(TorchFunctionMode):
    """A context in which `layer` computes with `arithmetic` instead of `batch_norm`.

    `sizes` are those of the inputs with which it did so, and -1 if the running statistics were not its own.
    """

    def __init__(self, layer: Any, arithmetic: Arithmetic):
        super().__init__()
        self.layer, self.arithmetic, self.sizes = layer, arithmetic, list[int]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not batch_norm:
            return func(*args, **(kwargs or {}))
        is_own = args[1] is None or args[1] is self.layer.running_mean
        self.sizes.append(args[0].numel() if is_own else -1)
        return self.arithmetic(self.layer, *args, **(kwargs or {}))


def _synchronized(
    layer: nn.Module,
    input: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Batch normalization over the shards of all processes, with differentiable all-reduces."""
    if not training:
        return batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    x = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
    others = [dim for dim in range(x.dim()) if dim != 1]
    shape = [1, -1] + [1] * (x.dim() - 2)
    count = x.numel() // x.size(1) * torch.distributed.get_world_size()  # all shards have the same size
    # Two passes, as in one process: the mean of squares minus the squared mean suffers from cancellation.
    mean = _sum_over_ranks(x.sum(others)) / count
    centered = x - mean.view(shape)
    variance = _sum_over_ranks(centered.square().sum(others)) / count
    if running_mean is not None and running_var is not None:
        with torch.no_grad():
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            running_var.lerp_((variance * (count / max(1, count - 1))).to(running_var.dtype), momentum)
    normalized = centered * torch.rsqrt(variance + eps).view(shape)
    if weight is not None:
        normalized = normalized * weight.view(shape)
    if bias is not None:
        normalized = normalized + bias.view(shape)
    return normalized.to(input.dtype)


def _deferred(
    layer: Any,
    input: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Batch normalization that collects statistics of micro-batches, between updates, in buffers of `layer`.

    They are the number of values per channel, their mean, and the sum of their squared deviations from the mean.
    """
    if not training or running_mean is None:
        return batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    # With a momentum of one, torch's kernel returns the statistics of the micro-batch, without a second pass.
    mean, variance = torch.zeros_like(layer.seen_mean), torch.zeros_like(layer.seen_squares)
    output = batch_norm(input, mean, variance, weight, bias, True, 1.0, eps)
    count = input.numel() // input.size(1)
    total, distance = layer.seen + count, mean - layer.seen_mean
    layer.seen_mean += distance * (count / total)
    layer.seen_squares += variance * (count - 1) + distance.square() * (layer.seen * count / total)
    layer.seen += count
    return output


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
