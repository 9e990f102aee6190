"""A trial of an optimizer of a user's file: what it needs that a run, a resume or a parallel mode has not."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch

from runner.config.errors import ConfigError, check, described
from runner.torch_optimizer import changed_options, class_of, load_changed_options, options_of

_SHAPES = ((4, 3), (3, 2), (3,))

ALL, SAME = "all parameters", "random numbers that are the same in all processes"
"""What the update of a parameter may need: the other parameters, or random numbers."""


def check_of_user(kind: str, options: dict[str, Any]) -> None:
    """Refuse an optimizer that needs more than gradients, does not follow learning rates, or cannot be resumed."""
    try:
        why = _trouble(kind, options)
    except ConfigError:
        raise
    except Exception as error:
        why = f"its step, which is called without arguments, raises {described(error)}"
    check(not why, "name", kind, why, "keep state in self.state[parameter], and numbers in self.param_groups")


def needs_of_user(kind: str, options: dict[str, Any]) -> frozenset[str]:
    """Return which of `ALL` and `SAME` the updates of an optimizer need."""
    together, others = _Parameters(), _Parameters()
    joint = class_of(kind)([{"params": together.tensors}], **options)
    alone = [class_of(kind)([{"params": [each]}], **options) for each in others.tensors]
    _train(together, [joint])
    _train(others, alone)
    # Numbers in groups may be sums over parameters, as that of which Prodigy makes a learning rate in later steps.
    is_alone = others.equal(together) and all(options_of(each) == options_of(joint) for each in alone)
    found = {ALL: is_alone, SAME: not together.draws}
    return frozenset(need for need, is_right in found.items() if not is_right)


class _Parameters:
    """Parameters with values of their own; `draws` says whether an update drew at random."""

    def __init__(self) -> None:
        self._random, self.draws = torch.Generator().manual_seed(0), False
        self.tensors = [torch.nn.Parameter(each) for each in self._values()]

    def _values(self) -> list[torch.Tensor]:
        return [torch.randn(shape, generator=self._random, dtype=torch.float64) for shape in _SHAPES]

    def set_gradients(self) -> None:
        for parameter, value in zip(self.tensors, self._values(), strict=True):
            parameter.grad = value

    def equal(self, other: _Parameters) -> bool:
        ours, theirs = (torch.cat([p.detach().flatten() for p in each.tensors]) for each in (self, other))
        return torch.allclose(ours, theirs, rtol=1e-9, atol=0)


def _train(parameters: _Parameters, optimizers: list[torch.optim.Optimizer], steps: Iterable[int] = range(4)) -> None:
    for step in steps:
        parameters.set_gradients()
        with torch.random.fork_rng([]):
            for optimizer in optimizers:
                state = torch.default_generator.manual_seed(step).get_state()
                optimizer.step()
                parameters.draws |= not torch.equal(torch.get_rng_state(), state)


def _trouble(kind: str, options: dict[str, Any]) -> str:
    """Return in words what a run would not do as a loop of its own; empty if it is nothing."""

    def made(parameters: _Parameters, **group: Any) -> torch.optim.Optimizer:
        return class_of(kind)([{"params": parameters.tensors, **group}], **options)

    whole, given, resumed, still = (_Parameters() for _ in range(4))
    optimizer = made(whole, **options)
    if not isinstance(optimizer, torch.optim.Optimizer):
        return f"it makes a {type(optimizer).__name__}, and no torch.optim.Optimizer"
    _train(whole, [optimizer])
    _train(given, [made(given)])
    if not given.equal(whole) or optimizer.param_groups[0]["lr"] != options["lr"]:
        return "it changes the learning rate, or another option, that the run sets in its groups"
    _train(still, [made(still, **{**options, "lr": 0.0})])
    if not still.equal(_Parameters()):
        return "it changes parameters although the learning rate in its groups is 0: schedules would have no effect"
    first, second = made(resumed, **options), made(resumed, **options)
    before = options_of(first)
    _train(resumed, [first], range(2))
    numbers = (bool, int, float, torch.Tensor, type(None))
    if kept := [key for state in first.state.values() for key, each in state.items() if not isinstance(each, numbers)]:
        return f"its state has {kept[0]}, and checkpoints save tensors and numbers"
    second.state.update(copy.deepcopy({**first.state}, {id(each): each for each in resumed.tensors}))
    load_changed_options(second, changed_options(first, before))
    _train(resumed, [second], range(2, 4))
    return "" if resumed.equal(whole) else "a run that is resumed would go on otherwise: it has state elsewhere"
