"""Tests of deferred batch normalization, whose running statistics are those of the whole batch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from models.recompute import Block
from runner.parallel.pipelining.deferred_batch_norm import DeferredBatchNorm, defer, update


def network(dtype: torch.dtype = torch.float64, momentum: float | None = 0.1, recompute: bool = False) -> nn.Module:
    torch.manual_seed(0)
    norms = nn.BatchNorm2d(4, momentum=momentum), nn.BatchNorm1d(3, affine=False, momentum=momentum)
    return Block(
        recompute, conv=nn.Conv2d(2, 4, 3), norm=norms[0], flat=nn.Flatten(), fc=nn.Linear(16, 3), last=norms[1]
    ).to(dtype)


def batches(count: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.randn(12, 2, 4, 4, dtype=dtype) * (i + 1) + 3 for i in range(count)]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-5)])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_running_statistics_are_those_of_the_whole_batch(
    momentum: float | None, recompute: bool, dtype: torch.dtype, tolerance: float
) -> None:
    """In each layer, the expected statistics are computed from the layer's inputs in all micro-batches together."""
    model, seen = network(dtype, momentum, recompute), {}
    defer(model)
    wanted = {name: [torch.zeros_like(m.running_mean), torch.ones_like(m.running_var)] for name, m in norms(model)}
    for name, module in norms(model):
        module.register_forward_pre_hook(
            lambda _, inputs, name=name: seen.setdefault(name, []).append(inputs[0].detach())
        )
    for step, batch in enumerate(batches(3, dtype), start=1):
        seen.clear()
        outputs = [model(part) for part in batch.split((5, 5, 2))]
        torch.cat(outputs).sum().backward()
        update(model)
        for name, (mean, variance) in wanted.items():
            whole = torch.cat(seen[name][:3]).transpose(0, 1).flatten(1)
            share = momentum or 1 / step
            mean.lerp_(whole.mean(1), share)
            variance.lerp_(whole.var(1), share)
    for name, module in norms(model):
        for got, want in zip((module.running_mean, module.running_var), wanted[name], strict=True):
            torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
        assert int(module.num_batches_tracked) == 3


def norms(model: nn.Module) -> list[tuple[str, DeferredBatchNorm]]:
    return [(name, module) for name, module in model.named_modules() if isinstance(module, DeferredBatchNorm)]


def test_outputs_and_gradients_are_those_of_micro_batches() -> None:
    plain, deferred = network(), network()
    defer(deferred)
    for part in batches(1, torch.float64)[0].split(4):
        outputs = [model(part) for model in (plain, deferred)]
        assert torch.equal(*outputs)
        for output in outputs:
            output.square().sum().backward()
    for one, other in zip(plain.parameters(), deferred.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]


def test_evaluation_and_state_dict_are_unchanged() -> None:
    plain, deferred = network(), network()
    defer(deferred)
    assert plain.state_dict().keys() == deferred.state_dict().keys()
    x = batches(1, torch.float64)[0]
    assert torch.equal(plain.eval()(x), deferred.eval()(x))
    update(deferred)  # must also work without any micro-batch


def test_a_norm_without_running_statistics_is_unchanged() -> None:
    model = nn.Sequential(nn.BatchNorm2d(2, track_running_stats=False))
    defer(model)
    assert type(model[0]) is nn.BatchNorm2d


def test_inputs_without_channels_are_refused() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2))
    defer(model)
    with pytest.raises(ValueError, match=r"shape \[2\]: there are no channels"):
        model(torch.zeros(2))
