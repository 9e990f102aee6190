"""The training loop that everybody knows, in plain PyTorch: what `train` is held to in every mode."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from torch.nn.functional import cross_entropy

from runner.run import Run
from runner.seeds import derive

STEPS = 10
BATCH = 48
COMMON = ("data.crop=0", "schedule=constant", f"steps={STEPS}", f"batch_size={BATCH}", "log_every=1", "eval_every=0")
"""Overrides of a run that `plain_loop` follows."""

CASES: dict[str, tuple[list[str], Callable[..., torch.optim.Optimizer]]] = {
    "sgd": (["optimizer.lr=0.05"], lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)),
    "nesterov": (
        ["optimizer.lr=0.05", "optimizer.nesterov=true", "optimizer.weight_decay=0.01"],
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    ),
    "adam": (["optimizer=adam", "optimizer.lr=0.003"], lambda p: torch.optim.Adam(p, lr=0.003)),
    "adamw": (["optimizer=adamw", "optimizer.lr=0.003"], lambda p: torch.optim.AdamW(p, lr=0.003, weight_decay=0.01)),
}
"""Overrides that choose an optimizer, and what makes it."""


class Plain(NamedTuple):
    """What `plain_loop` ends with: weights by name, and the loss and the accuracy of every step."""

    weights: dict[str, torch.Tensor]
    losses: list[float]
    accuracies: list[float]


def plain_loop(
    run: Run,
    optimizer: Callable[..., torch.optim.Optimizer],
    learning_rates: list[float] | None = None,
    max_norm: float | None = None,
    dtype: torch.dtype = torch.float32,
    steps: int = STEPS,
    parts: int = 1,
    change: Callable[[Run], None] | None = None,
    after: Path | None = None,
) -> Plain:
    """Train as `run` says, by hand.

    Args:
        learning_rates: of every step.
        max_norm: to clip the gradients to.
        parts: of a batch, each seen by a copy of the model with buffers of its own, which are averaged at the end.
        change: is done to the run before its model is built.
        after: a checkpoint to go on from.
    """
    samples, _ = run.workload.data.load()  # pyright: ignore[reportAttributeAccessIssue]
    torch.manual_seed(derive(run.seed, "weights"))
    if change is not None:
        change(run)
    run.workload.train = samples  # pyright: ignore[reportAttributeAccessIssue]
    model = run.workload.build_model().to(dtype)
    update = optimizer([p for p in model.parameters() if p.requires_grad])
    first = _continue(model, update, after) if after else 0
    copies = [model] + [copy.deepcopy(model) for _ in range(parts - 1)]
    losses, accuracies = [], []
    # One permutation an epoch, laid end to end: a batch may begin in one and end in the next.
    epochs = [derive(run.seed, "order", epoch) for epoch in range(2)]
    stream = torch.cat([torch.randperm(len(samples), generator=torch.Generator().manual_seed(e)) for e in epochs])
    for step in range(first, steps):
        indices = stream[step * run.batch_size : (step + 1) * run.batch_size]
        update.zero_grad()
        outputs = []
        for part, own in zip(copies, indices.chunk(parts), strict=True):
            part.load_state_dict(dict(model.named_parameters()), strict=False)  # buffers stay each copy's own
            outputs.append(part(samples.inputs[own].to(dtype)))
            loss = cross_entropy(outputs[-1], samples.targets[own]) / parts
            loss.backward(inputs=[p for p in part.parameters() if p.requires_grad])
        for parameters in zip(*(part.parameters() for part in copies), strict=True):
            for parameter in parameters[1:]:
                if parameter.grad is not None:
                    parameters[0].grad += parameter.grad
                    parameter.grad = None
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        if learning_rates:
            update.param_groups[0]["lr"] = learning_rates[step]
        update.step()
        whole = torch.cat(outputs)
        losses.append(cross_entropy(whole, samples.targets[indices]).item())
        accuracies.append((whole.argmax(1) == samples.targets[indices]).float().mean().item())
    for buffers in zip(*(part.buffers() for part in copies), strict=True):
        if buffers[0].is_floating_point():
            buffers[0].copy_(torch.stack(buffers).mean(0))
    return Plain(model.state_dict(), losses, accuracies)


def _continue(model: torch.nn.Module, update: torch.optim.Optimizer, path: Path) -> int:
    """Take over the weights and the moments of a checkpoint; returns its step."""
    model.load_state_dict(safetensors.torch.load_file(path / "model.safetensors"))
    moments = torch.load(path / "state.pt", weights_only=True)["optimizer"]
    update.state.update({parameter: moments[name] for name, parameter in model.named_parameters()})
    return int(path.name.partition("_")[2])


def plain_evaluation(run: Run, weights: dict[str, torch.Tensor]) -> tuple[float, float]:
    """The loss and the accuracy of `weights` on every held-out sample at once."""
    run.workload.train, held_out = run.workload.data.load()  # pyright: ignore[reportAttributeAccessIssue]
    model = run.workload.build_model().to(next(iter(weights.values())).dtype)
    model.load_state_dict(weights)
    with torch.no_grad():
        outputs = model.eval()(held_out.inputs.to(next(model.parameters()).dtype))
    loss = cross_entropy(outputs.float(), held_out.targets).item()
    return loss, (outputs.argmax(1) == held_out.targets).double().mean().item()


def weights_at(directory: Path, step: int) -> dict[str, torch.Tensor]:
    """The weights in a checkpoint of a run directory."""
    return safetensors.torch.load_file(directory / "checkpoints" / f"step_{step:08d}" / "model.safetensors")


def largest_difference(got: dict[str, Any], wanted: dict[str, Any]) -> float:
    """The largest relative difference of any tensor, by norm."""
    assert got.keys() == wanted.keys()
    differences = {n: (got[n].double() - wanted[n].double()).norm() for n in wanted}
    return max((differences[n] / wanted[n].double().norm().clamp_min(1e-12)).item() for n in wanted)
