"""Whether runs may be computed together: what a pass gives alone, and what it leaves behind."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.nn.modules.dropout import _DropoutNd

from runner.data.base import copied
from runner.parallel.attributes import attributes_kept
from runner.parallel.buffers import buffers_kept
from runner.parallel.stack.member import Request
from runner.seeds import drawn_since, random_states, set_random_states
from runner.system.trees import Tree, leaves_of

_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""The largest difference between the first passes, stacked and alone, relative to the largest value, by precision."""


def alone(request: Request) -> Tree:
    """Return what a pass of one run gives, which changes nothing: in training, with gradients and buffers."""
    member, model = request.member, request.model
    with buffers_kept(member.modules(model)):
        found = member.pass_of(request, model, copied(request.batch))
        if request.weight is None:
            return found
        loss, metrics = found
        trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
        gradients = torch.autograd.grad(loss * request.weight, [*trained.values()], allow_unused=True)
        by_name = {name: each for name, each in zip(trained, gradients, strict=True) if each is not None}
        buffers = {name: each.clone() for name, each in model.named_buffers()}
        return {"loss": loss.detach(), "metrics": metrics, "gradients": by_name, "buffers": buffers}


def carried(request: Request) -> str:
    """Return in words what a pass leaves behind, or uses, that the runs would have in common; empty if nothing.

    Parameters and buffers of the network are each run's own. What the pass has changed is changed back.
    """
    modules, devices = request.member.modules(request.model), request.member.devices
    for each in modules:
        if names := [name or type(part).__name__ for name, part in each.named_modules() if _has_hooks(part)]:
            return f"{names[0]} has hooks, which may have a state of their own"
    random = random_states(devices)
    buffers = [copied(dict(each.named_buffers())) for each in modules]
    with attributes_kept(modules) as changed, buffers_kept(modules):
        request.member.pass_of(request, request.model, copied(request.batch))
        names = changed()
        if modules[1:] and (name := different(dict(modules[1].named_buffers()), buffers[1])):
            names.append(name)
    drawn = drawn_since(random, devices)
    set_random_states(random, devices)
    if host := [name for name in drawn if name in ("random", "numpy")]:
        return f"a pass draws from {host[0]}, and the runs would draw the same"
    return f"a pass changes {names[0]}, which the runs would have in common" if names else ""


def _has_hooks(module: torch.nn.Module) -> bool:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    hooks = [hook for kind in kinds for hook in vars(module).get(kind, {}).values()]
    return any(not getattr(hook, "__module__", "").startswith("runner.") for hook in hooks)


def rounding(request: Request) -> float:
    """Return how much passes may differ, relative to the largest value."""
    return _ROUNDING.get(request.member.dtype(request.model), 1e-4)


def different(ours: Tree, theirs: Tree, rounding: float = 0.0) -> str:
    """Return the name of the first tensor that differs by more than `rounding`; empty if none does."""
    wanted = dict(leaves_of(theirs))
    # Of all gradients: some are zero but for rounding, such as that of a bias before a batch normalization.
    gradients = [each for name, each in wanted.items() if name.startswith("gradients.") and each.numel()]
    largest = max((float(each.abs().max()) for each in gradients), default=0.0)
    for name, our in leaves_of(ours):
        their = wanted.pop(name, None)
        if not isinstance(our, torch.Tensor):
            continue
        if not isinstance(their, torch.Tensor) or our.shape != their.shape:
            return name
        if not our.is_floating_point() and not our.is_complex():
            if not our.equal(their):
                return name
            continue
        if not our.numel() or not bool(their.isfinite().all()):
            continue
        scale = largest if name.startswith("gradients.") else float(their.abs().max())
        if not float((our - their).abs().max()) <= rounding * scale:
            return name
    return next(iter(wanted), "")


def seconds(function: Callable[[], object]) -> float:
    """Return the shortest time of three calls."""
    found = []
    for _ in range(3):
        start = time.perf_counter()
        function()
        found.append(time.perf_counter() - start)
    return min(found)


@contextmanager
def dropout_off(models: Sequence[torch.nn.Module]) -> Iterator[None]:
    """A context without dropout, which draws other numbers for stacked networks."""
    modules = [each for model in models for each in model.modules() if isinstance(each, _DropoutNd) and each.training]
    for each in modules:
        each.training = False
    try:
        yield
    finally:
        for each in modules:
            each.training = True


def place(error: Exception) -> str:
    """Return what went wrong, and the line of the user's code, or else of the network's, that was executed."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [
        each
        for each in frames
        if "/torch/" not in each.filename and Path(each.filename).parent != Path(__file__).parent
    ]
    where = f"{own[-1].filename}, line {own[-1].lineno}: " if own else ""
    return f"{where}{str(error).partition('. ')[0].splitlines()[0] if str(error) else type(error).__name__}"
