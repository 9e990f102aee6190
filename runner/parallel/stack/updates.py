"""Updates of several networks by their optimizers, in one call.

Each optimizer keeps its options and its state. For the call, the first one has the parameters and the states of all:
torch's optimizers, fused or not, compute each parameter by itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from runner.torch_optimizer import parts_of

_PLAIN = (bool, int, float, str, tuple, type(None))


def form_of(optimizer: torch.optim.Optimizer) -> tuple[Any, ...]:
    """Return what has to be the same for optimizers that take their step together.

    An optimizer that is not torch's, or has hooks, or a tensor among its options, has a form that no other has.
    """
    parts = parts_of(optimizer)
    hooks = [hook for each in parts for hook in (each._optimizer_step_pre_hooks, each._optimizer_step_post_hooks)]
    groups = [group for part in parts for group in part.param_groups]
    is_plain = all(isinstance(value, _PLAIN) for group in groups for name, value in group.items() if name != "params")
    if any(hooks) or not is_plain or not all(type(each).__module__.startswith("torch.optim.") for each in parts):
        return (id(optimizer),)
    return tuple(type(each) for each in parts)


def update_together(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Take the step of all `optimizers`, which have the same form."""
    for parts in zip(*map(parts_of, optimizers), strict=True):
        _take_step(parts)


def _take_step(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    first, groups = optimizers[0], dict[Any, dict[str, Any]]()
    state: defaultdict[torch.Tensor, Any] = defaultdict(dict)
    for optimizer in optimizers:
        state.update(optimizer.state)
        for group in optimizer.param_groups:
            options = {name: value for name, value in group.items() if name != "params"}
            same = groups.setdefault(tuple(options.items()), {**options, "params": []})
            same["params"] += group["params"]
    own = first.param_groups, first.state
    first.param_groups, first.state = [*groups.values()], state
    try:
        first.step()
    finally:
        first.param_groups, first.state = own
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            optimizer.state.update({each: state[each] for each in group["params"] if each in state})
