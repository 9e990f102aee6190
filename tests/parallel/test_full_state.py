"""Tests of the full state: collecting it from a model and its optimizer, loading it, and sharding."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.runs import assert_bitwise_equal
from torch import nn

from runner.parallel import full_state

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
}


def network(seed: int) -> nn.Module:
    """Return a network with a convolution in NHWC memory format, buffers, and a frozen parameter."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 3))
    model[0].to(memory_format=torch.channels_last)
    model[3].bias.requires_grad_(False)
    return model


def trained(optimizer: str, seed: int = 0, num_steps: int = 1) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model and its optimizer after some steps."""
    model = network(seed)
    update = OPTIMIZERS[optimizer]([p for p in model.parameters() if p.requires_grad])
    for _ in range(num_steps):
        step(model, update)
    return model, update


def step(model: nn.Module, update: torch.optim.Optimizer) -> None:
    generator = torch.Generator().manual_seed(1)
    model(torch.randn(5, 2, 4, 4, generator=generator)).square().mean().backward()
    update.step()
    update.zero_grad()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_collect_returns_copies_by_parameter_name(optimizer):
    model, update = trained(optimizer)
    tensors, states = full_state.collect(model, update, keep=True)
    assert_bitwise_equal(dict(tensors), dict(model.state_dict()))
    assert list(tensors) == list(model.state_dict())
    assert list(states) == [name for name, p in model.named_parameters() if p.requires_grad]
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert_bitwise_equal(states[name], {**update.state[parameter]})
    assert all(tensor.is_contiguous() for tensor in tensors.values()), "safetensors takes no other"
    before = tensors["3.weight"].clone()
    step(model, update)
    assert torch.equal(tensors["3.weight"], before)


@pytest.mark.parametrize("num_steps", [0, 1])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_with_a_loaded_state_is_bitwise_exact(optimizer, num_steps):
    model, update = trained(optimizer)
    other, other_update = trained(optimizer, 7, num_steps)
    full_state.load(other, other_update, *full_state.collect(model, update, keep=True))
    convolution = other[0].weight
    assert not convolution.is_contiguous()
    for moment in other_update.state[convolution].values():
        assert moment.dim() == 0 or moment.stride() == convolution.stride(), "fused kernels need one memory format"
    for _ in range(3):
        step(model, update)
        step(other, other_update)
    assert_bitwise_equal(dict(other.state_dict()), dict(model.state_dict()))
    assert full_state.collect(model, update, keep=False) == ({}, {}), "a rank that only sends its shards"


def test_shards_are_gathered_and_distributed_again(ranks):
    """The tensor has seven rows, which three ranks cannot divide evenly."""
    for rank, (full, own, again) in enumerate(ranks(3).call_on_all(shard_and_gather)):
        wanted = torch.arange(21.0).view(7, 3)
        assert torch.equal(full, wanted)
        assert torch.equal(own, wanted.chunk(3)[rank])
        assert torch.equal(again, own + 1)
    plain = torch.ones(2)
    assert full_state.full_tensor(plain) is plain
    assert full_state.shard_like(plain, plain) is plain


def shard_and_gather() -> list[Any]:
    """In a rank: return the full tensor gathered from all shards, its own shard, and its shard of another tensor."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from runner.device import Device
    from runner.parallel.ddp import DDP

    with DDP().launcher(Device(kind="cpu")).connect():
        whole = torch.arange(21.0).view(7, 3)
        sharded = distribute_tensor(whole, init_device_mesh("cpu", (3,)), [Shard(0)])
        again: Any = full_state.shard_like(sharded, whole + 1)
        return [full_state.full_tensor(sharded), sharded.to_local(), again.to_local()]
