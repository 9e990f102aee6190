"""A training loop in plain PyTorch, with which `train` is compared in every mode."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import safetensors.torch
import torch
from torch.nn.functional import cross_entropy

from runner.run import Run
from runner.seeds import derive

STEPS = 10
BATCH_SIZE = 48
PLAIN_LOOP_OVERRIDES = (
    *("data.crop=0", "schedule=constant"),
    *(f"steps={STEPS}", f"batch_size={BATCH_SIZE}", "log_every=1", "eval_every=0"),
)
"""Overrides of a run that `plain_loop` can reproduce."""

OPTIMIZER_CASES: dict[str, tuple[list[str], Callable[..., torch.optim.Optimizer]]] = {
    "sgd": (["optimizer.lr=0.05"], lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)),
    "nesterov": (
        ["optimizer.lr=0.05", "optimizer.nesterov=true", "optimizer.weight_decay=0.01"],
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    ),
    "adam": (["optimizer=adam", "optimizer.lr=0.003"], lambda p: torch.optim.Adam(p, lr=0.003)),
    "adamw": (["optimizer=adamw", "optimizer.lr=0.003"], lambda p: torch.optim.AdamW(p, lr=0.003, weight_decay=0.01)),
    "groups": (
        ["optimizer.weight_decay=0.1", "optimizer.groups={conv1:{lr:0.01,weight_decay:0.3},*.fc.bias:{lr:0.2}}"],
        lambda p: torch.optim.SGD(
            [
                {"params": p[:2], "lr": 0.01, "weight_decay": 0.3},
                {"params": [p[5], p[7]], "lr": 0.2},
                {"params": [p[2], p[3], p[4], p[6]]},
            ],
            lr=0.05,
            momentum=0.9,
            weight_decay=0.1,
        ),
    ),
    "layer_decay": (
        ["optimizer.weight_decay=0.1", "optimizer.layer_decay=0.5", "optimizer.decay_norms=false"],
        lambda p: torch.optim.SGD(
            [
                {"params": [tensor], "lr": 0.05 / 2 ** (3 - i // 2), "weight_decay": 0 if i % 2 else 0.1}
                for i, tensor in enumerate(p)
            ],
            lr=0.05,
            momentum=0.9,
        ),
    ),
}
"""Overrides that choose an optimizer, and its constructor. The tiny network has four layers with weight and bias."""


def together(*optimizers: torch.optim.Optimizer) -> Any:
    """Return optimizers of different parameters as one."""

    def step() -> None:
        for each in optimizers:
            each.step()

    def zero_grad() -> None:
        for each in optimizers:
            each.zero_grad()

    return SimpleNamespace(step=step, zero_grad=zero_grad)


def muon_and_adamw(parameters: list[torch.nn.Parameter]) -> Any:
    matrices, others = (
        [p for p in parameters if (p.dim() == 2 and not p.is_complex()) == is_matrix] for is_matrix in (True, False)
    )
    muon = torch.optim.Muon(matrices, 0.003, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(others, 0.003, weight_decay=0.1)
    return together(muon, adamw)


def sgd_and_adamw(parameters: list[torch.nn.Parameter]) -> Any:
    return together(
        torch.optim.SGD(parameters[:2], 0.1, 0.8),
        torch.optim.AdamW(
            [{"params": parameters[3::2], "betas": (0.8, 0.95), "eps": 1e-6}, {"params": parameters[2::2]}], 0.003
        ),
    )


ALL_OPTIMIZER_CASES: dict[str, tuple[list[str], Callable[..., Any]]] = {
    **OPTIMIZER_CASES,
    "nadam": (["optimizer=nadam", "optimizer.lr=0.003"], lambda p: torch.optim.NAdam(p, lr=0.003)),
    "rmsprop": (["optimizer=rmsprop", "optimizer.lr=0.003"], lambda p: torch.optim.RMSprop(p, lr=0.003)),
    "muon": (["optimizer=muon", "optimizer.lr=0.003"], muon_and_adamw),
    "kinds": (
        [
            *("optimizer=adamw", "optimizer.lr=0.003"),
            "optimizer.groups={conv1:{optimizer:sgd,lr:0.1,momentum:0.8},*.bias:{betas:[0.8,0.95],eps:1e-6}}",
        ],
        sgd_and_adamw,
    ),
}
"""`OPTIMIZER_CASES`, and more to compare in float64.

Muon orthogonalizes in bfloat16, and the others divide by small gradients.
"""


class PlainResult(NamedTuple):
    weights: dict[str, torch.Tensor]
    losses: list[float]
    metrics: list[float]


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs.argmax(1) == targets).double().mean()


Function = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class PlainSettings:
    num_steps: int = STEPS
    dtype: torch.dtype = torch.float32
    learning_rates: tuple[float, ...] = ()  # of every step; if empty, that of the optimizer
    max_norm: float | None = None
    num_batch_shards: int = 1  # each goes through a copy of the model with its own buffers
    frozen: str = ""
    loss: Function = cross_entropy
    metric: Function = accuracy
    changed: Callable[[int, torch.Tensor, torch.Tensor], tuple] = lambda step, inputs, targets: (inputs, targets)


def plain_loop(
    run: Run, optimizer: Callable[..., torch.optim.Optimizer], settings: PlainSettings = PlainSettings()
) -> PlainResult:
    """Train the model of `run` in plain PyTorch, from fresh weights."""
    model = _fresh_model(run, settings)
    return train_plain_from(run, model, optimizer([p for p in model.parameters() if p.requires_grad]), settings)


def plain_loop_from(
    checkpoint: Path, run: Run, optimizer: Callable[..., torch.optim.Optimizer], settings: PlainSettings
) -> PlainResult:
    """Train the model of `run` in plain PyTorch, from the weights and the optimizer state of a checkpoint."""
    model = _fresh_model(run, settings)
    update = optimizer(list(model.parameters()))
    model.load_state_dict(safetensors.torch.load_file(checkpoint / "model.safetensors"))
    states = torch.load(checkpoint / "state.pt", weights_only=True)["optimizer"]
    update.state.update({parameter: states[name] for name, parameter in model.named_parameters()})
    return train_plain_from(run, model, update, settings, first=int(checkpoint.name.partition("_")[2]))


def _fresh_model(run: Run, settings: PlainSettings) -> torch.nn.Module:
    run.workload.prepare()
    torch.manual_seed(derive(run.seed, "weights"))
    model = run.workload.build_model().to(settings.dtype)
    if settings.frozen:
        model.get_submodule(settings.frozen).requires_grad_(False)
    return model


def train_plain_from(
    run: Run, model: torch.nn.Module, update: torch.optim.Optimizer, settings: PlainSettings, first: int = 0
) -> PlainResult:
    """Train `model` with the optimizer `update` in plain PyTorch, starting after step `first`."""
    samples = run.workload.train  # pyright: ignore[reportAttributeAccessIssue]
    dtype, num_batch_shards = settings.dtype, settings.num_batch_shards
    copies = [model] + [copy.deepcopy(model) for _ in range(num_batch_shards - 1)]
    losses, metrics = [], []
    # One permutation per epoch, concatenated: a batch may extend over two epochs.
    epochs = [derive(run.seed, "order", epoch) for epoch in range(2)]
    stream = torch.cat([torch.randperm(len(samples), generator=torch.Generator().manual_seed(e)) for e in epochs])
    for step in range(first, settings.num_steps):
        indices = stream[step * run.batch_size : (step + 1) * run.batch_size]
        update.zero_grad()
        outputs = []
        inputs, targets = settings.changed(step, samples.inputs[indices], samples.targets[indices])
        targets = targets.to(dtype) if targets.is_floating_point() else targets
        shards = zip(copies, inputs.to(dtype).chunk(num_batch_shards), targets.chunk(num_batch_shards), strict=True)
        for part, seen, wanted in shards:
            part.load_state_dict(dict(model.named_parameters()), strict=False)  # each copy keeps its own buffers
            outputs.append(part(seen))
            loss = settings.loss(outputs[-1], wanted) / num_batch_shards
            loss.backward(inputs=[p for p in part.parameters() if p.requires_grad])
        for parameters in zip(*(part.parameters() for part in copies), strict=True):
            for parameter in parameters[1:]:
                if parameter.grad is not None:
                    parameters[0].grad += parameter.grad
                    parameter.grad = None
        if settings.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_norm)
        if settings.learning_rates:
            update.param_groups[0]["lr"] = settings.learning_rates[step]
        update.step()
        whole = torch.cat(outputs)
        losses.append(settings.loss(whole, targets).item())
        metrics.append(settings.metric(whole, targets).item())
    for buffers in zip(*(part.buffers() for part in copies), strict=True):
        if buffers[0].is_floating_point():
            buffers[0].copy_(torch.stack(buffers).mean(0))
    return PlainResult(model.state_dict(), losses, metrics)


def plain_evaluation(run: Run, weights: dict[str, torch.Tensor]) -> tuple[float, float]:
    """The loss and accuracy of `weights` on all held-out samples, as a single batch."""
    run.workload.prepare()
    held_out = run.workload.held_out  # pyright: ignore[reportAttributeAccessIssue]
    model = run.workload.build_model().to(next(iter(weights.values())).dtype)
    model.load_state_dict(weights)
    with torch.no_grad():
        outputs = model.eval()(held_out.inputs.to(next(model.parameters()).dtype))
    loss = cross_entropy(outputs.float(), held_out.targets).item()
    return loss, accuracy(outputs, held_out.targets).item()


def weights_at(directory: Path, step: int) -> dict[str, torch.Tensor]:
    checkpoint = directory / "checkpoints" / f"step_{step:08d}"
    beside = torch.load(checkpoint / "state.pt", weights_only=True).get("model.safetensors", {})  # as of complex128
    return safetensors.torch.load_file(checkpoint / "model.safetensors") | beside


def largest_difference(got: dict[str, Any], wanted: dict[str, Any]) -> float:
    """The largest relative difference over all tensors, ‖got − wanted‖ / ‖wanted‖."""
    assert got.keys() == wanted.keys()
    pairs = {n: (got[n].double(), wanted[n].double()) for n in wanted}
    # Of equal infinities, as in a mask, the difference is no number.
    differences = {n: (ours - theirs)[ours != theirs].norm() for n, (ours, theirs) in pairs.items()}
    norms = {n: theirs[theirs.isfinite()].norm().clamp_min(1e-12) for n, (_, theirs) in pairs.items()}
    return max((differences[n] / norms[n]).item() for n in wanted)
