"""Tests of batch normalization over the shards of several processes, and over the micro-batches of a pipeline."""

from typing import Any

import pytest
import torch
from helpers.compose import TINY_CPU, compose_config
from helpers.ranks import connected_session
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from runner.config.errors import ConfigError
from runner.models.layers import Block
from runner.parallel import batch_norm
from runner.parallel.batch_norm import convert_sync_batch_norm, defer, update

CPU = torch.device("cpu")
CASES = [((6, 4, 3, 3), 0.1, True), ((6, 4, 3, 3), None, False), ((6, 4), 0.1, False), ((6, 4), None, True)]
"""The shape of the inputs, the momentum, and whether there are weights."""


def norm(shape: tuple[int, ...], momentum: float | None, affine: bool) -> nn.Module:
    kind = nn.BatchNorm2d if len(shape) == 4 else nn.BatchNorm1d
    module = kind(shape[1], momentum=momentum, affine=affine).double()
    if affine:
        torch.manual_seed(1)
        nn.init.normal_(module.weight)
        nn.init.normal_(module.bias)
    return module


def trained(module: nn.Module, shape: tuple[int, ...], shard: int, num_shards: int) -> dict[str, list[torch.Tensor]]:
    """Return outputs and gradients for a shard of three batches, and the state of `module` after the last one."""
    generator = torch.Generator().manual_seed(0)
    outputs, gradients = [], []
    for number in range(3):
        batch = torch.randn(shape, generator=generator, dtype=torch.float64) * (number + 1) + number
        x = batch.chunk(num_shards)[shard].clone().requires_grad_()
        y = module(x)
        y.square().sum().mul(0.5).add((y * torch.arange(y.shape[1]).view(-1, *[1] * (y.dim() - 2))).sum()).backward()
        assert x.grad is not None
        outputs.append(y.detach())
        gradients.append(x.grad)
    weights = [p.grad for p in module.parameters() if p.grad is not None]
    state = [tensor.double() for tensor in module.state_dict().values()]
    return {"outputs": outputs, "inputs": gradients, "weights": weights, "state": state}


@pytest.mark.parametrize(("shape", "momentum", "affine"), CASES, ids=str)
def test_shards_are_normalized_with_the_statistics_of_the_whole_batch(shape, momentum, affine, ranks):
    whole = trained(norm(shape, momentum, affine), shape, 0, 1)
    config = compose_config(*TINY_CPU, "parallel=ddp", "batch_size=63")
    found = ranks(3).call_on_all(in_rank, shape, momentum, affine, config)
    for name, merge in {"outputs": torch.cat, "inputs": torch.cat, "weights": sum}.items():
        for number, wanted in enumerate(whole[name]):
            torch.testing.assert_close(merge([each[name][number] for each in found]), wanted, rtol=1e-10, atol=1e-10)
    for each in found:
        torch.testing.assert_close(each["state"], whole["state"], rtol=1e-10, atol=1e-10)


def in_rank(shape: tuple[int, ...], momentum: float | None, affine: bool, config: dict[str, Any]) -> Any:
    with connected_session(config) as (_, session):
        layer = norm(shape, momentum, affine)
        convert_sync_batch_norm(layer, CPU)
        return trained(layer, shape, session.rank, 3)


def network(dtype: torch.dtype = torch.float64, momentum: float | None = 0.1, recompute: bool = False) -> nn.Module:
    torch.manual_seed(0)
    norms = nn.BatchNorm2d(4, momentum=momentum), nn.BatchNorm1d(3, affine=False, momentum=momentum)
    return Block(
        recompute, conv=nn.Conv2d(2, 4, 3), norm=norms[0], flat=nn.Flatten(), fc=nn.Linear(16, 3), last=norms[1]
    ).to(dtype)


def images(scale: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(12, 2, 4, 4, dtype=dtype) * scale + 3


@pytest.mark.parametrize(
    ("dtype", "tolerance", "recompute", "momentum"),
    [(torch.float64, 1e-13, True, 0.1), (torch.float64, 1e-13, False, None), (torch.float32, 1e-5, False, 0.1)],
)
def test_running_statistics_are_those_of_the_whole_batch(dtype, tolerance, recompute, momentum):
    """In each layer, the expected statistics are computed from the layer's inputs in all micro-batches together."""
    model, seen = network(dtype, momentum, recompute), {}
    defer(model)
    norms: dict[str, Any] = {n: module for n, module in model.named_modules() if isinstance(module, _BatchNorm)}
    wanted = {name: [torch.zeros_like(m.running_mean), torch.ones_like(m.running_var)] for name, m in norms.items()}
    for name, module in norms.items():
        module.register_forward_pre_hook(
            lambda _, inputs, name=name: seen.setdefault(name, []).append(inputs[0].detach())
        )
    for step in (1, 2, 3):
        seen.clear()
        outputs = [model(part) for part in images(step, dtype).split((5, 5, 2))]
        torch.cat(outputs).sum().backward()
        update(model)
        for name, (mean, variance) in wanted.items():
            whole = torch.cat(seen[name][:3]).transpose(0, 1).flatten(1)
            share = momentum or 1 / step
            mean.lerp_(whole.mean(1), share)
            variance.lerp_(whole.var(1), share)
    for name, module in norms.items():
        for got, want in zip((module.running_mean, module.running_var), wanted[name], strict=True):
            torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
        assert int(module.num_batches_tracked) == 3


def test_outputs_and_gradients_are_those_of_micro_batches():
    plain, deferred = network(), network()
    defer(deferred)
    for part in images(1).split(4):
        outputs = [model(part) for model in (plain, deferred)]
        assert torch.equal(*outputs)
        for output in outputs:
            output.square().sum().backward()
    gradients: Any = ([p.grad for p in model.parameters()] for model in (plain, deferred))
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


class Activated(nn.BatchNorm2d):
    """As timm's `BatchNormAct2d`: it repeats torch's forward pass, and applies an activation."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        factor: Any = self.momentum
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            factor = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        args = (self.running_mean, self.running_var, self.weight, self.bias, self.training, factor, self.eps)
        return nn.functional.elu(nn.functional.batch_norm(input, *args))


class Scaled(nn.BatchNorm2d):
    """It changes inputs and outputs, and accepts inputs of three dimensions."""

    def _check_input_dim(self, input: torch.Tensor) -> None:
        assert input.dim() in (3, 4)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input.transpose(-1, -2) * 3).tanh()


class Split(nn.BatchNorm2d):
    """As timm's `SplitBatchNorm2d`: it normalizes each half of its inputs by itself."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return torch.cat([super(Split, self).forward(half) for half in input.chunk(2)])


class ByHand(nn.BatchNorm2d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return (input - input.mean((0, 2, 3), keepdim=True)) / input.var((0, 2, 3), keepdim=True).sqrt()


def subclassed(kind: type[nn.BatchNorm2d], momentum: float | None) -> nn.Module:
    torch.manual_seed(1)
    layer = kind(4, momentum=momentum).double()
    nn.init.normal_(layer.weight)
    nn.init.normal_(layer.bias)
    return layer


@pytest.mark.parametrize(("kind", "momentum"), [(Activated, 0.3), (Activated, None), (Scaled, 0.3), (Scaled, None)])
def test_a_subclass_with_a_forward_pass_of_its_own_is_synchronized_in_it(kind, momentum, ranks):
    shape = (6, 4, 3, 3)
    whole = trained(subclassed(kind, momentum), shape, 0, 1)
    config = compose_config(*TINY_CPU, "parallel=ddp", "batch_size=63")
    found = ranks(3).call_on_all(subclassed_in_rank, kind, momentum, shape, config)
    for name, merge in {"outputs": torch.cat, "inputs": torch.cat, "weights": sum}.items():
        for number, wanted in enumerate(whole[name]):
            torch.testing.assert_close(merge([each[name][number] for each in found]), wanted, rtol=1e-10, atol=1e-10)
    for each in found:
        torch.testing.assert_close(each["state"], whole["state"], rtol=1e-10, atol=1e-10)


def subclassed_in_rank(kind: Any, momentum: float | None, shape: tuple[int, ...], config: dict[str, Any]) -> Any:
    with connected_session(config) as (_, session):
        layer = subclassed(kind, momentum)
        convert_sync_batch_norm(layer, CPU)
        return trained(layer, shape, session.rank, 3)


@pytest.mark.parametrize(("kind", "momentum"), [(Activated, 0.3), (Activated, None), (Scaled, 0.3), (Scaled, None)])
def test_a_deferred_subclass_has_its_own_outputs_and_the_statistics_of_the_whole_batch(kind, momentum):
    layer, plain, whole = (subclassed(kind, momentum) for _ in range(3))
    defer(layer)
    for step in (1, 2):
        batch = torch.randn(12, 4, 3, 3, dtype=torch.float64) * step + step
        whole(batch)
        for part in batch.split((5, 5, 2)):
            assert torch.equal(layer(part), plain(part))
        update(layer)
    assert isinstance(layer, kind)
    torch.testing.assert_close(layer.state_dict(), whole.state_dict(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", [Split, ByHand])
@pytest.mark.parametrize("convert", [defer, lambda model: convert_sync_batch_norm(model, CPU)], ids=["defer", "sync"])
def test_a_layer_that_computes_something_else_is_refused_in_its_first_forward_pass(kind, convert, monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    monkeypatch.setattr(batch_norm, "_sum_over_ranks", lambda tensor: tensor)
    layer = subclassed(kind, 0.1)
    convert(layer)
    layer.eval()(torch.randn(4, 4, 3, 3, dtype=torch.float64))
    with pytest.raises(ConfigError, match=f"{kind.__name__} of the network cannot be converted") as refused:
        layer.train()(torch.randn(4, 4, 3, 3, dtype=torch.float64))
    assert refused.value.key in ("parallel.sync_batch_norm", "parallel.batch_norm")


def test_a_layer_whose_object_has_a_forward_pass_of_its_own_is_refused():
    layer = subclassed(nn.BatchNorm2d, 0.1)
    layer.forward = lambda input: input
    with pytest.raises(ConfigError, match="BatchNorm2d of the network cannot be converted"):
        defer(nn.Sequential(layer))


@pytest.mark.parametrize("convert", [defer, lambda model: convert_sync_batch_norm(model, CPU)], ids=["defer", "sync"])
def test_names_and_outputs_in_evaluation_are_unchanged(convert):
    plain, converted = network(), network()
    convert(converted)
    assert list(plain.state_dict()) == list(converted.state_dict())
    x = images(1)
    assert torch.equal(plain.eval()(x), converted.eval()(x))
    update(converted)  # must also work without any micro-batch
    stateless = nn.Sequential(nn.BatchNorm2d(2, track_running_stats=False))
    defer(stateless)
    assert type(stateless[0]) is nn.BatchNorm2d
