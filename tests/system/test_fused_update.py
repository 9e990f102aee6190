"""Tests of `runner.system.fused_update`: it equals `optimizer.step()` bit for bit, and says when it cannot be used."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from runner.system import fused_update

Make = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, fused=True),
    "sgd, momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01, fused=True),
    "sgd, nesterov": lambda p: torch.optim.SGD(p, 0.1, momentum=0.8, nesterov=True, fused=True),
    "adam": lambda p: torch.optim.Adam(p, 0.01, (0.8, 0.99), 1e-5, 0.1, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01, (0.8, 0.99), 1e-5, 0.1, fused=True),
}
OTHERS: dict[str, Make] = {
    "adam, not fused": lambda p: torch.optim.Adam(p, 0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01),
    "amsgrad": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True, fused=True),
}


def network(dtype: torch.dtype = torch.float32) -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3)).to(dtype)


def groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Return two groups with learning rates of their own, and an empty group."""
    first, *others = model.parameters()
    return [{"params": [first], "lr": 0.05}, {"params": others}, {"params": []}]


def train(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: Callable[[torch.optim.Optimizer], Any]
) -> None:
    inputs = torch.randn(6, 8, 5, generator=torch.Generator().manual_seed(1), dtype=next(model.parameters()).dtype)
    for number, batch in enumerate(inputs):
        optimizer.param_groups[0]["lr"] = 0.05 / (1 + number)  # as a schedule does
        model(batch).square().mean().backward()
        step(optimizer)
        optimizer.zero_grad()


def assert_same(one: torch.optim.Optimizer, other: torch.optim.Optimizer) -> None:
    """Assert that the parameters and the states of two optimizers are equal bit for bit."""
    pairs = zip(parameters(one), parameters(other), strict=True)
    for a, b in pairs:
        assert torch.equal(a, b)
        assert one.state[a].keys() == other.state[b].keys()
        for name, value in one.state[a].items():
            assert torch.equal(value, other.state[b][name]), name


def parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("make", (OPTIMIZERS | OTHERS).values(), ids=(OPTIMIZERS | OTHERS).keys())
def test_updates_equal_those_of_torch_bitwise(make: Make, dtype: torch.dtype) -> None:
    expected, model = network(dtype), network(dtype)
    optimizers = make(groups(expected)), make(groups(model))

    train(expected, optimizers[0], lambda optimizer: optimizer.step())
    train(model, optimizers[1], fused_update.step)

    assert not torch.equal(next(model.parameters()), next(network(dtype).parameters()))
    assert_same(*optimizers)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_only_the_first_update_calls_the_step_of_torch(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()
    optimizer = make(groups(model))
    calls: list[int] = []
    whole_step = optimizer.step
    monkeypatch.setattr(optimizer, "step", lambda: (calls.append(1), whole_step()))
    train(model, optimizer, fused_update.step)
    needs_state = bool(optimizer.state[next(model.parameters())])
    assert len(calls) == (1 if needs_state else 0)


def test_hooks_are_called_and_may_change_the_gradients() -> None:
    expected, model = network(), network()
    optimizers = [OPTIMIZERS["adam"](each.parameters()) for each in (expected, model)]
    for each, optimizer in zip((expected, model), optimizers, strict=True):
        train(each, optimizer, fused_update.step)
        each(torch.ones(2, 5)).square().mean().backward()
    seen: list[str] = []

    def double(network: torch.nn.Module) -> None:
        for parameter in network.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(2)

    optimizers[1].register_step_pre_hook(lambda *_: (seen.append("pre"), double(model))[0])
    optimizers[1].register_step_post_hook(lambda *_: seen.append("post"))
    fused_update.step(optimizers[1])
    double(expected)
    optimizers[0].step()

    assert seen == ["pre", "post"]
    assert_same(*optimizers)


def test_parameters_without_a_gradient_do_not_change() -> None:
    expected, model = network(), network()
    optimizers = [OPTIMIZERS["sgd, momentum"](each.parameters()) for each in (expected, model)]
    train(expected, optimizers[0], lambda optimizer: optimizer.step())
    train(model, optimizers[1], fused_update.step)
    for each in (expected, model):
        each(torch.ones(2, 5)).square().mean().backward()
        next(each.parameters()).grad = None
    before = next(model.parameters()).detach().clone()

    optimizers[0].step()
    fused_update.step(optimizers[1])

    assert torch.equal(next(model.parameters()), before)
    assert_same(*optimizers)


def test_a_profiler_sees_the_step_of_the_optimizer() -> None:
    model = network()
    optimizer = OPTIMIZERS["adam"](model.parameters())
    train(model, optimizer, fused_update.step)
    model(torch.ones(2, 5)).square().mean().backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        fused_update.step(optimizer)
    assert "Optimizer.step#Adam.step" in {event.key for event in profile.key_averages()}


def test_a_loaded_state_is_updated() -> None:
    expected, model = network(), network()
    optimizers = [OPTIMIZERS["adamw"](each.parameters()) for each in (expected, model)]
    train(expected, optimizers[0], lambda optimizer: optimizer.step())
    train(model, optimizers[1], fused_update.step)
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    train(expected, optimizers[0], lambda optimizer: optimizer.step())
    train(model, optimizers[1], fused_update.step)
    assert_same(*optimizers)
