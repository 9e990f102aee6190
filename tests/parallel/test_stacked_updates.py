"""Updates of several networks in one call: bit for bit those of each optimizer by itself."""

import copy
import inspect

import pytest
import torch

from runner.optimizer import SGD, Adam, AdamW, Muon, Named, Optimizer
from runner.parallel.stack.updates import form_of, update_together

ELSEWHERE = ("Optimizer", "LBFGS", "SparseAdam", "Muon")
NAMES = [
    name
    for name, each in inspect.getmembers(torch.optim, inspect.isclass)
    if issubclass(each, torch.optim.Optimizer) and name not in ELSEWHERE
]
OPTIONS: dict[str, Optimizer] = {
    **{name: Named(name=name, lr=0.01) for name in NAMES},
    "sgd": SGD(lr=0.1),
    "sgd without momentum": SGD(lr=0.1, momentum=0.0, weight_decay=0.01),
    "adam": Adam(lr=0.01, weight_decay=0.1),
    "adamw": AdamW(lr=0.01, weight_decay=0.1, decay_norms=False),
    "adamw, not fused": AdamW(lr=0.01, fused=False),
    "muon": Muon(lr=0.01, groups={"0.*": {"lr": 0.003}}),
}


def networks(count: int) -> list[torch.nn.Module]:
    def network() -> torch.nn.Module:
        layers = (torch.nn.Linear(5, 7), torch.nn.LayerNorm(7), torch.nn.Linear(7, 3), torch.nn.Linear(3, 3))
        return torch.nn.Sequential(*layers).double()

    return [network() for _ in range(count)]


def states_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    found = {name: each.detach() for name, each in model.named_parameters()}
    for name, each in model.named_parameters():
        state = {key: torch.as_tensor(value) for key, value in optimizer.state.get(each, {}).items()}
        found |= {f"{name} {key}": value for key, value in state.items()}
    return found


@pytest.mark.parametrize("name", OPTIONS)
def test_updates_together_are_those_of_each_alone(name):
    """Five networks, two of them with a rate of their own, one that comes later, and layers without a gradient."""
    ours = networks(5)
    theirs = copy.deepcopy(ours)
    both = [[OPTIONS[name].build(model) for model in models] for models in (ours, theirs)]
    for step in range(6):
        for index, pair in enumerate(zip(ours, theirs, strict=True)):
            gradients = [torch.randn_like(each) for each in pair[0].parameters()]
            for model in pair:
                for each, gradient in zip(model.parameters(), gradients, strict=True):
                    each.grad = gradient.clone()
                if index == 1:
                    model[3].weight.grad = None  # pyright: ignore
        for optimizers in both:
            for group in optimizers[0].param_groups + optimizers[3].param_groups:
                group["lr"] = 0.02 / (step + 1)
        members = range(4) if step < 3 else range(1, 5)
        update_together([both[0][index] for index in members])
        for index in members:
            both[1][index].step()
    for model, optimizer, wanted, by_itself in zip(ours, both[0], theirs, both[1], strict=True):
        found, expected = states_of(model, optimizer), states_of(wanted, by_itself)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in found)


def test_optimizers_that_may_share_something_are_stepped_by_themselves():
    class Own(torch.optim.SGD):
        """Of somebody else."""

    models = networks(4)
    hooked, with_tensor = (torch.optim.SGD(model.parameters(), lr=0.1) for model in models[:2])
    hooked.register_step_post_hook(lambda *_: None)
    with_tensor.param_groups[0]["lr"] = torch.tensor(0.1)
    plain = [torch.optim.SGD(model.parameters(), lr=lr) for model, lr in zip(models[2:], (0.1, 0.2), strict=True)]
    alone = [hooked, with_tensor, Own(models[0].parameters(), lr=0.1), Own(models[1].parameters(), lr=0.1)]
    assert form_of(plain[0]) == form_of(plain[1])
    assert len({*map(form_of, [*alone, plain[0]])}) == 5
    assert form_of(torch.optim.Adam(models[0].parameters())) != form_of(plain[0])
