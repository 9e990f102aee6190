"""Tests of the optimizers: equality with torch's own, resume, frozen parameters, parameter groups and options."""

import copy
import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from helpers.compose import option_content
from helpers.plain_loop import muon_and_adamw

from runner.config.errors import ConfigError
from runner.config.schema import build
from runner.optimizer import SGD, Adam, AdamW, Muon, Named, Optimizer
from runner.parallel import full_state
from runner.torch_optimizer import learning_rates, parts_of


def option(name: str, **changes: Any) -> Optimizer:
    return build(option_content("optimizer", name) | changes, Optimizer, "optimizer")


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
    (option("nadam", lr=0.01), lambda p: torch.optim.NAdam(p, 0.01)),
    (
        option("nadam", lr=0.01, weight_decay=0.1, options={"eps": 1e-4, "decoupled_weight_decay": True}),
        lambda p: torch.optim.NAdam(p, 0.01, eps=1e-4, weight_decay=0.1, decoupled_weight_decay=True),
    ),
    (option("rmsprop", lr=0.01), lambda p: torch.optim.RMSprop(p, 0.01)),
    (
        option("rmsprop", lr=0.01, weight_decay=0.1, options={"momentum": 0.5, "centered": True}),
        lambda p: torch.optim.RMSprop(p, 0.01, weight_decay=0.1, momentum=0.5, centered=True),
    ),
    (
        Named(lr=0.01, weight_decay=0.1, name="Adagrad", options={"lr_decay": 0.1}),
        lambda p: torch.optim.Adagrad(p, 0.01, 0.1, 0.1),
    ),
    (Named(lr=0.01, name="Rprop"), lambda p: torch.optim.Rprop(p, 0.01)),
    (Muon(lr=0.003, weight_decay=0.1), lambda p: muon_and_adamw(list(p))),
]


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))


class Unusual(torch.nn.Module):
    """Parameters that are complex, 0-dimensional, of other types, transposed, and with gaps in their memory."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.scale = torch.nn.Parameter(torch.tensor(0.5))
        self.mixing = torch.nn.Parameter(torch.randn(5, 7, dtype=torch.complex64))
        self.fine = torch.nn.Parameter(torch.randn(7, dtype=torch.float64))
        self.transposed = torch.nn.Parameter(torch.randn(3, 7).T)
        self.gaps = torch.nn.Parameter(torch.randn(7, 6)[:, ::2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = (x.to(self.mixing.dtype) @ self.mixing).abs() * self.scale + self.fine.float()
        return (hidden @ self.transposed + hidden @ self.gaps).tanh()


def trained(model: torch.nn.Module, optimizer: torch.optim.Optimizer, num_steps: int = 6) -> list[torch.Tensor]:
    steps(model, optimizer, torch.randn(num_steps, 8, 5, generator=torch.Generator().manual_seed(1)))
    return [parameter.detach() for parameter in model.parameters()]


def steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batches: torch.Tensor) -> None:
    for batch in batches:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(("ours", "theirs"), CASES, ids=[repr(ours) for ours, _ in CASES])
def test_every_step_equals_that_of_torch(ours, theirs, fused):
    model, reference = network(), network()
    expected = trained(reference, theirs(reference.parameters()))
    optimizer = dataclasses.replace(ours, fused=fused).build(model)
    torch.testing.assert_close(trained(model, optimizer), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("ours", "theirs"), CASES, ids=[repr(ours) for ours, _ in CASES])
def test_parameters_that_fused_kernels_cannot_update_are_trained_as_by_torch(ours, theirs):
    model, reference = Unusual(), Unusual()
    expected = trained(reference, theirs(reference.parameters()))
    torch.testing.assert_close(trained(model, ours.build(model)), expected, rtol=1e-5, atol=1e-7)


def test_sparse_gradients_are_those_of_torch():
    """Only SGD takes them, and only without fused kernels."""

    def embedding() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Embedding(6, 3, sparse=True)

    model, reference = embedding(), embedding()
    for each, optimizer in (
        (model, SGD(lr=0.1).build(model)),
        (reference, torch.optim.SGD(reference.parameters(), 0.1, 0.9)),
    ):
        for rows in (torch.tensor([1, 2, 1]), torch.tensor([5, 1])):
            each(rows).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(model.weight, reference.weight)


@pytest.mark.parametrize("network", [network, Unusual])
@pytest.mark.parametrize("ours", [ours for ours, _ in CASES], ids=repr)
def test_resume_from_a_loaded_state_is_bitwise_exact(ours, network):
    whole, first, then = network(), network(), network()
    wanted = trained(whole, ours.build(whole), 6)
    optimizer = ours.build(first)
    inputs = torch.randn(6, 8, 5, generator=torch.Generator().manual_seed(1))
    steps(first, optimizer, inputs[:3])
    resumed = ours.build(then)
    full_state.load(then, resumed, *full_state.collect(first, optimizer, keep=True))
    steps(then, resumed, inputs[3:])
    assert all(torch.equal(a, b) for a, b in zip(then.parameters(), wanted, strict=True))


def double_trained(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    steps(model, optimizer, torch.randn(6, 8, 5, generator=torch.Generator().manual_seed(1)).double())
    return [parameter.detach() for parameter in model.parameters()]


def groups_of(**options: Any) -> list[tuple[str, float, float, list[str]]]:
    groups = SGD(lr=0.1, weight_decay=0.5, **options).parameter_groups(network())
    return [(each.name, each.options["lr"], each.options["weight_decay"], each.parameters) for each in groups]


def test_without_options_there_is_one_group():
    assert groups_of() == [("", 0.1, 0.5, ["0.weight", "0.bias", "2.weight", "2.bias"])]
    assert learning_rates(SGD(lr=0.1).build(network())) == {"lr": 0.1}


def test_a_parameter_belongs_to_the_first_pattern_that_matches_it():
    found = groups_of(groups={"*.bias": {"weight_decay": 0.0}, "2": {"lr": 0.3}, "0.*": {"lr": 0.2}})
    assert found == [
        ("", 0.1, 0.5, []),
        ("0.*", 0.2, 0.5, ["0.weight"]),
        ("", 0.1, 0.0, ["0.bias", "2.bias"]),
        ("2", 0.3, 0.5, ["2.weight"]),
    ]
    optimizer = SGD(lr=0.1, groups={"2": {"lr": 0.3}}).build(network())
    assert learning_rates(optimizer) == {"lr": 0.1, "lr/2": 0.3}


def test_decay_norms_false_exempts_norms_and_biases_unless_a_pattern_matches():
    assert groups_of(decay_norms=False, groups={"2.bias": {"weight_decay": 0.25}}) == [
        ("", 0.1, 0.5, ["0.weight", "2.weight"]),
        ("", 0.1, 0.0, ["0.bias"]),
        ("", 0.1, 0.25, ["2.bias"]),
    ]


@pytest.mark.cases(
    ({"groups": {"3": {"lr": 0.1}}}, "optimizer.groups", "3"),
    ({"groups": {"*": {"lr": 0.1}, "2": {"lr": 0.2}}}, "optimizer.groups", "2"),
    ({"layer_decay": 0.5}, "optimizer.layer_decay", 0.5),
)
def test_groups_without_parameters_are_refused(options, key, got):
    """`layer_decay` is refused, too, if the network lists no blocks."""
    model = torch.nn.ModuleDict({"0": torch.nn.Linear(5, 7), "2": torch.nn.Linear(7, 3)})
    with pytest.raises(ConfigError) as refused:
        SGD(lr=0.1, **options).parameter_groups(model)
    assert (refused.value.key, refused.value.got) == (key, got)


def test_a_pipeline_stage_has_the_parameter_groups_of_the_whole_model():
    """A group may be empty on a stage."""
    model, options = network(), SGD(lr=0.1, groups={"0": {"lr": 0.3}})
    groups = options.parameter_groups(model)
    model.get_submodule("0").weight = model.get_submodule("0").bias = None
    optimizer = options.build(model, groups)
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 0]
    assert learning_rates(optimizer) == {"lr": 0.1, "lr/0": 0.3}


def test_a_group_has_any_option_of_the_optimizer_and_others_have_theirs():
    """Those of its class in torch, too; what it does not set is that of the optimizer."""
    groups = {"0.weight": {"betas": [0.8, 0.95], "amsgrad": True}, "*.bias": {"beta2": 0.9, "eps": 1e-5, "lr": 0.03}}
    model, reference = network().double(), network().double()
    ours = AdamW(lr=0.01, beta1=0.7, weight_decay=0.1, options={"maximize": False}, groups=groups)
    named = dict(reference.named_parameters())
    theirs = torch.optim.AdamW(
        [
            {"params": [named["0.weight"]], "betas": (0.8, 0.95), "amsgrad": True},
            {"params": [named["0.bias"], named["2.bias"]], "betas": (0.7, 0.9), "eps": 1e-5, "lr": 0.03},
            {"params": [named["2.weight"]]},
        ],
        *(0.01, (0.7, 0.999)),
        weight_decay=0.1,
    )
    expected = double_trained(reference, theirs)
    torch.testing.assert_close(double_trained(model, ours.build(model)), expected, rtol=1e-12, atol=0)


KINDS = {
    "0": {"optimizer": "sgd", "lr": 0.2, "momentum": 0.5, "dampening": 0.1},
    "2.bias": {"optimizer": "torch", "name": "Adagrad", "lr": 0.05, "lr_decay": 0.1},
}


def in_plain_torch(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    named = dict(model.named_parameters())
    return [
        torch.optim.SGD([named["0.weight"], named["0.bias"]], 0.2, 0.5, dampening=0.1),
        torch.optim.Adagrad([named["2.bias"]], 0.05, lr_decay=0.1),
        torch.optim.AdamW([named["2.weight"]], 0.01, weight_decay=0.1),
    ]


def test_each_group_may_have_an_optimizer_of_its_own_also_after_a_resume():
    model, reference = network().double(), network().double()
    ours = AdamW(lr=0.01, weight_decay=0.1, groups=KINDS)
    inputs = torch.randn(6, 8, 5, generator=torch.Generator().manual_seed(1)).double()
    theirs = in_plain_torch(reference)
    for batch in inputs:
        reference.zero_grad()
        reference(batch).square().mean().backward()
        for optimizer in theirs:
            optimizer.step()
    optimizer, then = ours.build(model), network().double()
    steps(model, optimizer, inputs[:3])
    resumed = ours.build(then)
    full_state.load(then, resumed, *full_state.collect(model, optimizer, keep=True))
    for each, update in ((model, optimizer), (then, resumed)):
        steps(each, update, inputs[3:])
        torch.testing.assert_close([*each.parameters()], [*reference.parameters()], rtol=1e-12, atol=0)
    assert learning_rates(optimizer) == {"lr": 0.01, "lr/0": 0.2, "lr/2.bias": 0.05}


def test_a_step_of_a_copy_changes_nothing_of_the_optimizer():
    """A checkpoint is compared with the state after a step of a copy, also after `compile=step` has taken the parts."""
    model = network()
    optimizer = AdamW(lr=0.01, groups=KINDS).build(model)
    parts = parts_of(optimizer)
    full_state.load(model, optimizer, *full_state.collect(model, optimizer, keep=True))
    copied = copy.copy(optimizer)
    copied.param_groups = []
    copied.step()
    assert sum(len(group["params"]) for part in parts for group in part.param_groups) == 4


def test_muon_for_chosen_matrices_and_another_optimizer_for_the_rest():
    model, reference = network(), network()
    ours = AdamW(lr=0.01, groups={"2": {"optimizer": "muon", "lr": 0.003, "ns_steps": 3}})
    named = dict(reference.named_parameters())
    muon = torch.optim.Muon([named["2.weight"]], 0.003, 0.1, ns_steps=3, adjust_lr_fn="match_rms_adamw")
    rest = torch.optim.AdamW([named["0.weight"], named["0.bias"]], 0.01, weight_decay=0.0)
    bias = torch.optim.AdamW([named["2.bias"]], 0.003, weight_decay=0.1)
    for batch in torch.randn(6, 8, 5, generator=torch.Generator().manual_seed(1)):
        reference.zero_grad()
        reference(batch).square().mean().backward()
        for optimizer in (muon, rest, bias):
            optimizer.step()
    torch.testing.assert_close(trained(model, ours.build(model)), [*reference.parameters()], rtol=1e-5, atol=1e-7)


@pytest.mark.cases(
    ({"beta3": 0.1}, "beta3", "did you mean beta"),
    ({"beta1": 1.0}, "beta1", "see the comments in conf/optimizer/adamw.yaml"),
    ({"betas": [0.9, 1.0]}, "beta2", "see the comments"),
    ({"betas": [0.9]}, "betas", "betas: [0.9, 0.95]"),
    ({"betas": 0.9}, "betas", "betas: [0.9, 0.95]"),
    ({"betas": [0.9, 0.99], "beta1": 0.8}, "betas", "leave one of them out"),
    ({"eps": "small"}, "eps", "see the comments"),
    ({"amsgrad": 2}, "amsgrad", "see the comments"),
    ({"momentum": 0.9}, "momentum", "choose from"),
    ({"fused": False}, "fused", "optimizer.fused=…"),
    ({"capturable": True}, "capturable", "choose from"),
    ({"name": "Adagrad"}, "name", "{optimizer: torch, name: Adagrad}"),
    ({"optimizer": "Adagrad"}, "optimizer", "{optimizer: torch, name: Adagrad}"),
    ({"optimizer": "adamv"}, "optimizer", "did you mean adam"),
    ({"optimizer": "sgd", "beta1": 0.9}, "beta1", "choose from"),
    ({"optimizer": "sgd", "momentum": 2.0}, "momentum", "see the comments in conf/optimizer/sgd.yaml"),
    ({"optimizer": "sgd", "momentum": 0.0, "nesterov": True}, "nesterov", "momentum"),
    ({"optimizer": "torch", "name": "Adagrab"}, "name", "did you mean Adagrad"),
    ({"optimizer": "torch", "name": "Rprop", "weight_decay": 0.1}, "weight_decay", "weight_decay=0"),
    ids=str,
)
def test_options_of_a_group_are_checked_as_those_of_the_optimizer(options, key, remedy):
    node = option_content("optimizer", "adamw") | {"groups": {"head": options}}
    with pytest.raises(ConfigError) as refused:
        build(node, Optimizer, "optimizer")
    assert refused.value.key == f"optimizer.groups.head.{key}"
    assert remedy in refused.value.remedy


@pytest.mark.cases(
    ({"optimizer": "nadam", "options": {"momentum_decay": -1.0}}, "momentum_decay"),
    ({"optimizer": "nadam", "betas": [0.9, 0.99, 0.999]}, r"betas needs 2 numbers, and got \[0.9, 0.99, 0.999\]"),
    ({"optimizer": "nadam", "betas": [0.9, 1.5]}, "beta parameter at index 1"),
)
def test_values_that_torch_refuses_in_a_group_are_refused_before_the_first_step(options, why):
    with pytest.raises(ConfigError, match=why) as refused:
        AdamW(lr=0.1, groups={"2": options}).parameter_groups(network())
    assert refused.value.key == "optimizer.groups.2"


@pytest.mark.cases(
        ({"groups": {1.1: {"lr": 0.1}}}, "groups.1.1"),
        ({"name": "Adagrab"}, "name"), ({"name": "LBFGS"}, "name"), ({"name": "Muon"}, "name"),
        ({"options": {"lr_decoy": 0.1}}, "options.lr_decoy"), ({"options": {"lr": 0.1}}, "options.lr"),
        ({"options": {"lr_decay": -1.0}}, "options"), ({"name": "Rprop", "weight_decay": 0.1}, "weight_decay"),
)  # fmt: skip
def test_what_a_named_optimizer_does_not_take_is_refused_by_key(options, key):
    with pytest.raises(ConfigError) as refused:
        Named(lr=0.1, **options).build(network())
    assert refused.value.key.removeprefix("optimizer.") == key
