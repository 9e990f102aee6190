"""Tests that batch normalization over the shards of several processes equals that of the whole batch in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.compose import TINY_CPU, compose_config
from helpers.ranks import PersistentRanks, connected_session
from torch import nn

from runner.parallel.sync_batch_norm import convert_sync_batch_norm

CPU = torch.device("cpu")
SHAPES = {"images": (6, 4, 3, 3), "vectors": (6, 4)}


def norm(shape: tuple[int, ...], momentum: float | None, affine: bool) -> nn.Module:
    kind = nn.BatchNorm2d if len(shape) == 4 else nn.BatchNorm1d
    module = kind(shape[1], momentum=momentum, affine=affine).double()
    if affine:
        torch.manual_seed(1)
        nn.init.normal_(module.weight)
        nn.init.normal_(module.bias)
    return module


def batches(shape: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) * (i + 1) + i for i in range(3)]


def trained(module: nn.Module, parts: list[torch.Tensor]) -> dict[str, list[torch.Tensor]]:
    """Return outputs and gradients for `parts`, and the state of `module` after the last part."""
    outputs, gradients = [], []
    for part in parts:
        x = part.clone().requires_grad_()
        y = module(x)
        y.square().sum().mul(0.5).add((y * torch.arange(y.shape[1]).view(-1, *[1] * (y.dim() - 2))).sum()).backward()
        assert x.grad is not None
        outputs.append(y.detach())
        gradients.append(x.grad)
    weights = [p.grad for p in module.parameters() if p.grad is not None]
    state = [tensor.double() for tensor in module.state_dict().values()]
    return {"outputs": outputs, "inputs": gradients, "weights": weights, "state": state}


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("inputs", SHAPES)
def test_shards_are_normalized_with_the_statistics_of_the_whole_batch(
    inputs: str, momentum: float | None, affine: bool, ranks: Callable[[int], PersistentRanks]
) -> None:
    shape = SHAPES[inputs]
    whole = trained(norm(shape, momentum, affine), batches(shape))
    found = ranks(3).call_on_all(
        in_rank, shape, momentum, affine, compose_config(*TINY_CPU, "parallel=ddp", "batch_size=63")
    )
    for name in ("outputs", "inputs"):
        for number, wanted in enumerate(whole[name]):
            got = torch.cat([each[name][number] for each in found])
            torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)
    for number, wanted in enumerate(whole["weights"]):
        got = torch.stack([each["weights"][number] for each in found]).sum(0)
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)
    for each in found:
        for got, wanted in zip(each["state"], whole["state"], strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)


def in_rank(shape: tuple[int, ...], momentum: float | None, affine: bool, config: dict[str, Any]) -> Any:
    """Return the results of `trained` for this rank's third of each batch."""
    with connected_session(config) as (_, session):
        module = convert_sync_batch_norm(norm(shape, momentum, affine), CPU)
        return trained(module, [batch.chunk(3)[session.rank] for batch in batches(shape)])


def test_names_and_outputs_in_evaluation_are_unchanged() -> None:
    plain, converted = (nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4)) for _ in range(2))
    converted.load_state_dict(plain.state_dict())
    converted = convert_sync_batch_norm(converted, CPU)
    assert list(converted.state_dict()) == list(plain.state_dict())
    x = torch.randn(5, 2, 6, 6)
    assert torch.equal(converted.eval()(x), plain.eval()(x))
