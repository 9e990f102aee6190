"""The optimizers against torch's own, made by hand, over a few steps."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from helpers.compose import option_node

from runner.config.errors import ConfigError
from runner.config.schema import build, option_fields
from runner.optimizer import SGD, Adam, AdamW, Optimizer, trainable

CASES: list[tuple[Optimizer, Callable[[Iterable], torch.optim.Optimizer]]] = [
    (SGD(lr=0.1), lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)),
    (SGD(lr=0.05, momentum=0.0), lambda p: torch.optim.SGD(p, 0.05)),
    (
        SGD(lr=0.1, momentum=0.8, nesterov=True, weight_decay=0.01),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.8, nesterov=True, weight_decay=0.01),
    ),
    (Adam(lr=0.01), lambda p: torch.optim.Adam(p, 0.01)),
    (
        Adam(lr=0.01, beta1=0.8, beta2=0.95, eps=1e-4, weight_decay=0.1),
        lambda p: torch.optim.Adam(p, 0.01, (0.8, 0.95), 1e-4, 0.1),
    ),
    (AdamW(lr=0.01, weight_decay=0.1), lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.1)),
    (
        AdamW(lr=0.01, beta1=0.8, beta2=0.95, eps=1e-4, weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, 0.01, (0.8, 0.95), 1e-4, 0.1),
    ),
]


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))


def trained(model: torch.nn.Module, optimizer: torch.optim.Optimizer, num_steps: int = 6) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(num_steps):
        model(torch.randn(8, 5, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(("ours", "theirs"), CASES, ids=[repr(ours) for ours, _ in CASES])
def test_every_step_equals_torchs(ours: Optimizer, theirs: Callable, fused: bool) -> None:
    model, reference = network(), network()
    expected = trained(reference, theirs(reference.parameters()))
    optimizer = dataclasses.replace(ours, fused=fused).build(model)
    torch.testing.assert_close(trained(model, optimizer), expected, rtol=1e-5, atol=1e-7)


def test_fused_is_passed_on() -> None:
    for kind in (SGD, Adam, AdamW):
        for fused in (True, False):
            assert kind(lr=0.1, fused=fused).build(network()).param_groups[0]["fused"] is fused


@pytest.mark.parametrize("kind", [SGD, Adam, AdamW])
def test_frozen_parameters_are_not_trained(kind: type[Optimizer]) -> None:
    model = network()
    target = model.get_submodule("0").requires_grad_(False)
    before = [parameter.clone() for parameter in target.parameters()]
    optimizer = kind(lr=0.1, weight_decay=0.5).build(model)
    trained(model, optimizer)
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [
        id(p) for p in model.get_submodule("2").parameters()
    ]
    assert [id(p) for p in trainable(model)] == [id(p) for p in model.get_submodule("2").parameters()]
    for parameter, old in zip(target.parameters(), before, strict=True):
        assert torch.equal(parameter, old)


# ---------------------------------------------------------------------------------------------------------------------
# Options


@pytest.mark.parametrize(("name", "kind"), [("sgd", SGD), ("adam", Adam), ("adamw", AdamW)])
def test_the_option_lists_all_fields(name: str, kind: type) -> None:
    node = option_node("optimizer", name)
    optimizer = build(node, Optimizer, "optimizer")
    assert type(optimizer) is kind
    assert set(node) == {"_target_", *option_fields(kind)}
    assert {key: getattr(optimizer, key) for key in node if key != "_target_"} == {
        key: value for key, value in node.items() if key != "_target_"
    }


@pytest.mark.parametrize(
    ("kind", "options", "key"),
    [
        (SGD, {"lr": 0.0}, "lr"), (SGD, {"lr": -1.0}, "lr"), (SGD, {"lr": math.inf}, "lr"), (SGD, {"lr": 1e4}, "lr"),
        (SGD, {"lr": 0.1, "weight_decay": -0.1}, "weight_decay"),
        (SGD, {"lr": 0.1, "momentum": 1.5}, "momentum"), (SGD, {"lr": 0.1, "momentum": -0.5}, "momentum"),
        (SGD, {"lr": 0.1, "momentum": 0.0, "nesterov": True}, "nesterov"),
        (Adam, {"lr": 0.1, "beta1": 1.0}, "beta1"), (Adam, {"lr": 0.1, "beta2": -0.1}, "beta2"),
        (Adam, {"lr": 0.1, "eps": 0.0}, "eps"), (AdamW, {"lr": math.nan}, "lr"),
        (AdamW, {"lr": 0.1, "beta2": 1.0}, "beta2"),
    ],
)  # fmt: skip
def test_values_out_of_range_are_refused_by_key(kind: type, options: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as refused:
        kind(**options)
    assert refused.value.key == key


def test_the_base_class_is_abstract_and_refused_by_its_key() -> None:
    with pytest.raises(TypeError, match="abstract method build"):
        Optimizer(lr=0.1)  # pyright: ignore[reportAbstractUsage]
    with pytest.raises(ConfigError) as refused:
        build({"_target_": "runner.optimizer.Optimizer", "lr": 0.1}, Optimizer, "optimizer")
    assert (refused.value.key, refused.value.got) == ("optimizer._target_", "runner.optimizer.Optimizer")
