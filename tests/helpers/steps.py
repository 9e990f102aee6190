"""Training steps of a user, and of several phases, with what a plain loop with an optimizer each would compute."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import cross_entropy, kl_div, normalize, softplus

from helpers.compose import compose_config
from helpers.strange_networks import CPU, PLAIN, numbers, trained_with
from runner.config import user_code
from runner.seeds import derive

STEPS, BATCH = 4, 12
INPUTS, CLASSES = numbers()


class Net(nn.Module):
    """Submodules that steps call by themselves; it has no forward pass of its own."""

    def __init__(self, blocks: bool = False):
        super().__init__()
        self.encoder, self.head = nn.Sequential(nn.Linear(6, 8), nn.Tanh()), nn.Linear(8, 2)
        self.scale = nn.Parameter(torch.ones(8))
        if blocks:
            self.blocks = lambda: [("encoder", self.encoder), ("head", self.head)]


def networks() -> nn.Module:
    return nn.ModuleDict({"generator": Layers(3, 6), "discriminator": Layers(6, 1)})


class Layers(nn.Sequential):
    def __init__(self, num_inputs: int, num_outputs: int):
        super().__init__(nn.Linear(num_inputs, 8), nn.Tanh(), nn.Linear(8, num_outputs))


def teacher_and_student() -> nn.Module:
    model = nn.ModuleDict({"teacher": Layers(6, 2), "student": Layers(6, 2)})
    model["teacher"].requires_grad_(False)
    return model


def called_by_parts(model: Any, batch: Any) -> torch.Tensor:
    inputs, classes = batch
    return cross_entropy(model.head(model.encoder(inputs) * model.scale), classes)


def two_views(model: Any, batch: Any) -> dict[str, torch.Tensor]:
    """Two passes of one encoder, whose agreement is the loss, and a count of its own: the samples of class 1."""
    inputs, classes = batch
    one, other = (normalize(model.encoder(each) * model.scale) for each in (inputs, inputs.flip(1)))
    agreement, chosen = (one * other).sum(1), classes.to(inputs.dtype)
    return {"loss": (-(agreement * chosen).sum(), chosen.sum()), "agreement": agreement.mean()}


def distilled(model: Any, batch: Any) -> torch.Tensor:
    with torch.no_grad():
        wanted = model["teacher"](batch[0]).softmax(1)
    return kl_div(model["student"](batch[0]).log_softmax(1), wanted, reduction="batchmean")


def of_discriminator(model: Any, batch: Any) -> dict[str, torch.Tensor]:
    inputs, _ = batch
    real, fake = (softplus(each).mean() for each in (-model["discriminator"](inputs), scores_of_fakes(model, inputs)))
    return {"loss": real + fake, "real": real}


def of_critic(model: Any, batch: Any) -> torch.Tensor:
    """With a penalty of its gradient, for which the backward pass is differentiated."""
    inputs = batch[0].clone().requires_grad_()
    scores = model["discriminator"](inputs)
    [slope] = torch.autograd.grad(scores.sum(), inputs, create_graph=True)
    return scores_of_fakes(model, batch[0]).mean() - scores.mean() + (slope.norm(dim=1) - 1).square().mean()


def of_generator(model: Any, batch: Any) -> torch.Tensor:
    return softplus(-scores_of_fakes(model, batch[0])).mean()


def scores_of_fakes(model: Any, inputs: torch.Tensor) -> torch.Tensor:
    return model["discriminator"](model["generator"](inputs[:, :3].sin()))  # not detached


class Case(NamedTuple):
    model: Any
    given: dict[str, Any]
    phases: list[tuple[str, Any, int]]
    """The prefix of the parameters, the step and how often, of each phase."""


def of_phases(model: Any, *phases: tuple[str, Any, int]) -> Case:
    return Case(model, {"phases": {name: {"step": step, "every": every} for name, step, every in phases}}, [*phases])


CASES = {
    "parts": Case(Net, {"training_step": called_by_parts}, [("", called_by_parts, 1)]),
    "blocks": Case(lambda: Net(blocks=True), {"training_step": called_by_parts}, [("", called_by_parts, 1)]),
    "two views": Case(Net, {"training_step": two_views}, [("", two_views, 1)]),
    "distillation": Case(teacher_and_student, {"training_step": distilled}, [("", distilled, 1)]),
    "gan": of_phases(networks, ("discriminator", of_discriminator, 1), ("generator", of_generator, 1)),
    "critic": of_phases(networks, ("discriminator", of_critic, 1), ("generator", of_generator, 2)),
}
CASES["patterns"] = of_phases(networks, *CASES["gan"].phases)
CASES["patterns"].given["phases"]["discriminator"]["parameters"] = [
    "discriminator.0",
    "discriminator.*.bias",
    "discriminator.2",
]
CASES["critic"].given["evaluation_step"] = of_generator  # which needs no gradients


def parts_of(name: str) -> dict[str, Any]:
    """Return what the user passes; the held-out samples are those of the training."""
    return {"model": CASES[name].model, "data": ((INPUTS, CLASSES), (INPUTS, CLASSES)), **CASES[name].given}


def config_of(name: str, *overrides: str) -> dict[str, Any]:
    return compose_config(*user_code.passed(**parts_of(name)).added_to([*CPU, *overrides]))


def trained(name: str, config: dict[str, Any], directory: Path) -> Any:
    """Prove and train a run of `CASES[name]`; as `trained` of strange networks."""
    return trained_with(parts_of(name), config, directory)


def value_of(returned: Any) -> torch.Tensor:
    loss = returned["loss"] if isinstance(returned, dict) else returned
    return loss[0] / loss[1] if isinstance(loss, tuple) else loss


def plain(name: str, dtype: torch.dtype = torch.float64, autocast: bool = False) -> tuple[Any, list[list[float]]]:
    """Train in plain PyTorch, on whole batches, with an optimizer for each phase.

    Returns:
        The weights, and the losses of each phase.
    """
    torch.manual_seed(derive(0, "weights"))
    case = CASES[name]
    model = case.model().to(dtype)
    losses: list[list[float]] = [[] for _ in case.phases]
    optimizers = []
    for prefix, _, _ in case.phases:
        trained = [p for name, p in model.named_parameters() if name.startswith(prefix) and p.requires_grad]
        optimizers.append(torch.optim.AdamW(trained, lr=0.01))
    order = torch.randperm(len(INPUTS), generator=torch.Generator().manual_seed(derive(0, "order", 0)))
    for number, rows in enumerate(order.split(BATCH), start=1):
        batch = INPUTS[rows].to(dtype), CLASSES[rows]
        for optimizer, (_, step, every), of_phase in zip(optimizers, case.phases, losses, strict=True):
            if number % every == 0:
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    loss = value_of(step(model, batch))
                optimizer.zero_grad()
                loss.backward()
                of_phase.append(loss.item())
                optimizer.step()
    return model.state_dict(), losses


OPTIONS = (*PLAIN[-1:], "optimizer=adamw", "optimizer.lr=0.01", "optimizer.weight_decay=0.01", "log_every=1")


def trained_on_samples_of_rank(config: dict[str, Any], directory: Path) -> Any:
    """As `trained`, on data that is another one in each process."""
    samples = INPUTS + int(os.environ["RANK"]), CLASSES
    return trained_with(parts_of("parts") | {"data": (samples, samples)}, config, directory)
