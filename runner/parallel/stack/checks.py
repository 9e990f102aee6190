"""Whether runs may be computed together: what a pass gives alone, and what it leaves behind."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch.nn.modules.dropout import _DropoutNd

from runner.data.base import copied
from runner.parallel.attributes import plain_values, plain_values_kept
from runner.parallel.buffers import buffers_kept
from runner.parallel.stack.member import Request
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
    """Return the name of what a pass changes that is neither a parameter nor a buffer of the network; else empty."""
    names = ["the network", "the loss"]
    modules = request.member.modules(request.model)
    plain, buffers = [*map(plain_values, modules)], [copied(dict(each.named_buffers())) for each in modules]
    with ExitStack() as kept:
        for each in modules:
            kept.enter_context(plain_values_kept(each))
        with buffers_kept(modules):
            request.member.pass_of(request, request.model, copied(request.batch))
            changed = [different(dict(each.named_buffers()), old) for each, old in zip(modules, buffers, strict=True)]
        for name, each, old, buffer in zip(names, modules, plain, changed, strict=False):
            values = [key for key, value in plain_values(each).items() if value != old.get(key)]
            if values or (buffer and each is not request.model):
                return f"{(values or [buffer])[0]} of {name}"
    return ""


def rounding(request: Request) -> float:
    """Return how much passes may differ, relative to the largest value."""
    return _ROUNDING.get(request.member.dtype(request.model), 1e-4)


def different(ours: Tree, theirs: Tree, rounding: float = 0.0) -> str:
    """Return the name of the first tensor that differs by more than `rounding`; empty if none does."""
    wanted = dict(leaves_of(theirs))
    # Of all gradients: some are zero but for rounding, such as that of a bias before a batch normalization.
    largest = max(
        [float(g.abs().max()) for n, g in wanted.items() if n.startswith("gradients.") and g.numel()], default=0.0
    )
    for name, our in leaves_of(ours):
        their = wanted.pop(name, None)
        if not isinstance(our, torch.Tensor):
            continue
        if not isinstance(their, torch.Tensor) or our.shape != their.shape:
            return name
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
