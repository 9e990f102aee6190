"""What a first step does not show: state that a forward pass leaves to the next one, and gradients that are clipped."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from runner.batching import Plan
from runner.code_places import roots_of
from runner.code_state import CodeState
from runner.data.base import copied
from runner.parallel.attributes import plain_values, set_values
from runner.parallel.buffers import named_buffers, with_own_memory
from runner.parallel.session import Session
from runner.run import Run
from runner.seeds import random_states, set_random_states
from runner.verification.verdict import FLOAT32_ROUNDING, largest_difference

log = logging.getLogger(__name__)

_LARGER = 2.0**13
"""By how much a loss is larger, whose gradients may be clipped; of a power of two, nothing is rounded."""


def carried_state(run: Run, session: Session, parts: int) -> str:
    """Return the name of what each forward pass changes, as a buffer, and on which the next gradients depend.

    It is empty if there is none; that batch normalization sees parts of a batch is documented. The network is tried on
    the first of `parts` of a batch, with other values in its buffers, as some, such as converged power iterations,
    hardly change in the first step. `run` is a copy, whose components are changed.
    """
    workload, devices = run.workload, session.devices
    model = _fresh_model(run, session)
    modules = torch.nn.ModuleList([each for each in (model, workload.loss_module()) if each is not None])
    code = CodeState(roots_of(model, workload.user_loss))
    plan = Plan(run.batch_size, parts, seed=session.plan.seed)
    batch, random = next(workload.batches(model, plan, 0, session.device)), random_states(devices)

    def gradients() -> dict[str, torch.Tensor]:
        found = {}
        for phase in workload.phases(model):
            workload.phase = phase.name
            set_random_states(random, devices)
            with run.precision.autocast():
                loss, _ = workload.loss(model, copied(batch))
            loss.backward()
            named = model.named_parameters()
            found |= {f"{phase.name} {name}": each.grad.cpu() for name, each in named if each.grad is not None}
            model.zero_grad()
        return found

    try:
        gradients()  # which may fill a cache
        _add_to(named_buffers([*modules]) | code.tensors(), 1, lambda name: True)
        before = _state(modules, code)
        gradients()
        after = _state(modules, code)
        changed = [name for name, value in before.items() if not _are_equal(value, after.get(name, value))]
        if not changed:
            return ""
        _add_to(named_buffers([*modules]) | code.tensors(), -1, lambda name: name not in changed)
        first = gradients()
        _add_to(named_buffers([*modules]) | code.tensors(), 1, lambda name: name in changed)
        depends = largest_difference(gradients(), first).size > FLOAT32_ROUNDING
        if not depends:  # a counter may change something in a later step
            set_values(modules, {name: after[name] + 1000 for name in changed if type(after.get(name)) is int}, {})
            for name in {*changed} & {*(buffers := named_buffers([*modules]))}:
                buffers[name] += 1000 * (buffers[name].dtype in (torch.int32, torch.int64))
            depends = largest_difference(gradients(), first).size > FLOAT32_ROUNDING
    except Exception as error:  # of code that does not take all values, as of a matrix that it inverts
        log.debug("what a forward pass leaves to the next one is not known", exc_info=error)
        return ""
    return changed[0].partition(".")[2] if depends else ""


def clipped_gradient(run: Run, session: Session, parts: int) -> str:
    """Return the name of a parameter whose gradient is no multiple of the loss's, as a hook or a function clips it.

    It is empty if there is none. The gradients of the first of `parts` of a batch are computed for two sizes of the
    loss, as that of a part may have another size than that of the batch. `run` is a copy, whose components are changed.
    """
    workload, devices = run.workload, session.devices
    model = _fresh_model(run, session)
    batch = next(workload.batches(model, Plan(run.batch_size, parts, seed=session.plan.seed), 0, session.device))
    random = random_states(devices)
    try:
        for phase in workload.phases(model):
            workload.phase, found = phase.name, list[dict[str, torch.Tensor]]()
            with run.precision.autocast():
                loss, _ = workload.loss(model, copied(batch))
            for factor in (1, _LARGER):
                set_random_states(random, devices)
                model.zero_grad()
                (loss * factor).backward(retain_graph=True)
                found.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
            for each in found[0].values():
                each *= _LARGER
            if (most := largest_difference(*found)).size > FLOAT32_ROUNDING:
                return most.where
    except Exception as error:  # of code that has one backward pass only
        log.debug("whether gradients are clipped is not known", exc_info=error)
    return ""


def _fresh_model(run: Run, session: Session) -> torch.nn.Module:
    model = with_own_memory(run.precision.convert(run.workload.build_model()))
    model.to(session.device)  # which, as train(), may be a method of the user's that returns nothing
    model.train()
    return model


def _add_to(tensors: Mapping[str, torch.Tensor], amount: float, is_meant: Callable[[str], bool]) -> None:
    for name, each in tensors.items():
        if (each.is_floating_point() or each.is_complex()) and is_meant(name):
            each += amount


def _state(modules: torch.nn.ModuleList, code: CodeState) -> dict[str, Any]:
    """Return copies of the buffers, except of batch normalization, and what tells changes of other values, by name."""
    own = {prefix for prefix, each in modules.named_modules() if isinstance(each, _BatchNorm)}
    buffers = {name: each for name, each in named_buffers([*modules]).items() if name.rpartition(".")[0] not in own}
    return {name: each.clone() for name, each in buffers.items()} | plain_values(modules) | code.marks()


def _are_equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return bool(one == other)
