"""Tests of batch normalization over the shards of several processes, and over the micro-batches of a pipeline."""

from typing import Any

import pytest
import torch
from helpers.compose import TINY_CPU, compose_config
from helpers.ranks import connected_session
from torch import nn

from runner.models.layers import Block
from runner.parallel.batch_norm import BatchNormOfAnyDim, DeferredBatchNorm, convert_sync_batch_norm, defer, update

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
        return trained(convert_sync_batch_norm(norm(shape, momentum, affine), CPU), shape, session.rank, 3)


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
    norms = {name: module for name, module in model.named_modules() if isinstance(module, DeferredBatchNorm)}
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
    for one, other in zip(plain.parameters(), deferred.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


@pytest.mark.parametrize("convert", [defer, lambda model: convert_sync_batch_norm(model, CPU)], ids=["defer", "sync"])
def test_names_and_outputs_in_evaluation_are_unchanged(convert):
    plain, converted = network(), network()
    convert(converted)
    assert any(isinstance(module, BatchNormOfAnyDim) for module in converted.modules())
    assert list(plain.state_dict()) == list(converted.state_dict())
    x = images(1)
    assert torch.equal(plain.eval()(x), converted.eval()(x))
    update(converted)  # must also work without any micro-batch
    stateless = nn.Sequential(nn.BatchNorm2d(2, track_running_stats=False))
    defer(stateless)
    assert type(stateless[0]) is nn.BatchNorm2d
