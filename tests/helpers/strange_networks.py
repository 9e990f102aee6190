"""Networks, losses and data of users that parallel modes and compilers may compute differently than a single device."""

from __future__ import annotations

import copy
import math
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import distributed, nn
from torch.distributed.nn.functional import all_gather
from torch.func import functional_call, stack_module_state, vmap
from torch.nn.functional import cross_entropy, linear
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset

from helpers.compose import compose_config
from runner.config import user_code
from runner.config.errors import ConfigError
from runner.run import build_run
from runner.training import train
from runner.verification.proof import prove

CPU = ("device=cpu", "device.threads=1", "batch_size=12", "steps=4", "eval_every=2", "schedule=constant")
PLAIN = ("optimizer=sgd", "optimizer.lr=0.1", "optimizer.momentum=0", "optimizer.weight_decay=0", "precision=64")
"""The overrides of which `plain_weights` is the result."""


def numbers(count: int = 48) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(count, 6, generator=torch.Generator().manual_seed(0))
    return inputs, (inputs[:, 0] * inputs[:, 1] > 0).long()


def ignored() -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = numbers()
    return inputs, targets.masked_fill(torch.arange(48) % 3 == 0, -100)


def indices() -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randint(0, 20, (48, 4), generator=torch.Generator().manual_seed(0))
    return inputs, (inputs.sum(1) > 40).long()


def images() -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(48, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    return inputs, (inputs.mean((1, 2, 3)) > 0).long()


def chain(*inner: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), *inner, nn.Linear(8, 2))


def tanh() -> nn.Module:
    return chain(nn.Tanh())


def wide() -> nn.Module:
    """Weights that take more memory than everything else."""
    return chain(nn.Linear(8, 500), *(nn.Linear(500, 500) for _ in range(6)), nn.Linear(500, 8))


def reused() -> nn.Module:
    activation = nn.Tanh()
    return chain(activation, nn.Linear(8, 8), activation)


def in_place() -> nn.Module:
    return chain(nn.ReLU(inplace=True), nn.Linear(8, 8), nn.LeakyReLU(inplace=True))


class Experts(nn.Module):
    """Each sample is computed by one of several layers: a process may use some of them alone, or none of them."""

    def __init__(self, count: int = 4):
        super().__init__()
        self.experts, self.head = nn.ModuleList(nn.Linear(6, 4) for _ in range(count)), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result, which = x.new_zeros(len(x), 4), (x[:, 0].abs() * 10).long() % len(self.experts)
        for number, expert in enumerate(self.experts):
            if len(rows := (which == number).nonzero(as_tuple=True)[0]):
                result = result.index_add(0, rows, expert(x[rows]))
        return self.head(torch.tanh(result))


class NeverUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = chain(nn.Tanh()), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def masked() -> nn.Module:
    """The first rows of a weight keep their values: a hook multiplies their gradients by zero."""
    made, mask = chain(nn.Tanh()), torch.ones(8, 6)
    mask[:4] = 0
    made[0].weight.register_hook(lambda gradient: gradient * mask.to(gradient.dtype))
    return made


def limited(limit: float = 5.0, after: bool = False) -> nn.Module:
    """Hooks limit each value of a gradient, before or after it is accumulated. In the first step, none is 5."""

    def limits(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.clamp_(-limit, limit)

    made = chain(nn.Tanh())
    for each in made.parameters():
        if after:
            each.register_post_accumulate_grad_hook(limits)
        else:
            each.register_hook(lambda gradient: gradient.clamp(-limit, limit))
    return made


class LimitsInside(nn.Sequential):
    """It limits the gradients of what its first layer returns."""

    def __init__(self) -> None:
        super().__init__(*chain(nn.Tanh()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self[0](x)
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient.clamp(-5, 5))
        return self[2](self[1](y))


class AssignsBuffer(nn.Module):
    """The running mean of the inputs, assigned and not changed in place, is that of evaluations."""

    def __init__(self, in_training: bool = False):
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.layers, self.in_training = chain(nn.Tanh()), in_training

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = self.mean
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.layers(x - before if self.in_training or not self.training else x)


class WritesWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(20, 8, max_norm=1.0), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(x).mean(1))


class Teacher(nn.Module):
    """It keeps an average of its weights, as frozen parameters that each forward pass in training replaces."""

    def __init__(self, in_place: bool = False) -> None:
        super().__init__()
        self.layers, self.in_place = chain(nn.Tanh()), in_place
        self.teacher = copy.deepcopy(self.layers).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for mine, average in zip(self.layers.parameters(), self.teacher.parameters(), strict=True):
            if self.training and self.in_place:
                average.lerp_(mine.detach(), 0.1)
            elif self.training:
                average.data = average * 0.9 + mine.detach() * 0.1
        return self.layers(x) + 0.5 * self.teacher(x)


class LimitedNorm(nn.Linear):
    """The rows of its weight have a norm of at most one: longer ones are replaced in the forward pass."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data = torch.renorm(self.weight.data, 2, 0, 1.0)
        return linear(x, self.weight, self.bias)


class Centers(nn.Module):
    """What is computed of a sample depends on the others in the same forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = chain(nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x - x.mean(0))


class CentersAll(Centers):
    """It gathers the samples of all processes, if there are several, as losses of contrastive pairs do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.mean(0)
        if distributed.is_initialized():
            mean = torch.stack(all_gather(mean)).mean(0)
        return self.layers(x - mean)


class Recurrent(Centers):
    """It goes on with the mean of the last batch, in an attribute."""

    last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return self.layers(x)
        before, self.last = self.last, x.detach().mean(0)
        return self.layers(x if before is None else x + before)


class MakesParameters(Centers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "scale"):
            self.scale = nn.Parameter(torch.ones(x.shape[1]).to(x))
        return self.layers(x * self.scale)


class RegistersBuffer(Centers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.register_buffer("last", x.detach().mean(0))
        return self.layers(x)


class RemovesBuffer(Centers):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("start", torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.start is not None and self.training:
            x, self.start = x + self.start, None
        return self.layers(x)


class Detached(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.detach())


class Masked(nn.Module):
    """A mask of a sequence, with infinite values, is a buffer of the network."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0, batch_first=True)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(3))
        self.head = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(x[:, None].expand(-1, 3, -1), self.mask)[:, -1])


class Steps(nn.Linear):
    """It computes a sequence whose first dimension is that of the steps, and not that of the samples."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.stack([x, x.tanh(), -x]))


class MeanOfSteps(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.tanh().mean(0))


class Levels(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (4 * x).long().clamp(-5, 4) + 5


class OtherBlocks(Centers):
    """Its method of this name is not what modes look for."""

    def blocks(self) -> nn.Module:
        return self.layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks()(x)


class KnowsItsRank(Centers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x * (1 + (distributed.get_rank() if distributed.is_initialized() else 0)))


class WrongOrder(nn.Module):
    """The method `blocks`, by which a pipeline splits the network, names two of its layers in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = chain(nn.Tanh(), nn.Linear(8, 8), nn.Sigmoid())

    def blocks(self) -> list[tuple[str, nn.Module]]:
        return [(str(i), self.layers[i]) for i in (0, 3, 2, 1, 4)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class ScalesInEvaluation(WrongOrder):
    def blocks(self) -> list[tuple[str, nn.Module]]:
        return [(str(i), layer) for i, layer in enumerate(self.layers)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) * (1 if self.training else 3)


class MemoryOrder(nn.Module):
    """It reads the values of its input in the order in which they lie in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh())
        self.head = nn.Linear(64, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layers(x)
        return self.head(y.as_strided((len(y), 64), (64, 1)))


class Compiled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = chain(nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x * 2 if torch.compiler.is_compiling() else x)


def hooked(which: str) -> nn.Module:
    made = chain(nn.Tanh())
    if which == "before":
        made.register_forward_pre_hook(lambda _, inputs: (inputs[0] * 3 + 1,))
    elif which == "after":
        made.register_forward_hook(lambda _, inputs, outputs: outputs * 2)
    else:
        made.register_full_backward_hook(lambda _, gradients, outputs: None if gradients[0] is None else gradients)
        made.register_full_backward_pre_hook(lambda _, gradients: (gradients[0] * 2,))
    return made


class Temperature(nn.Module):
    """A parameter of no dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.temperature = chain(nn.Tanh()), nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) * self.temperature


class SparseParameter(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*chain(nn.Tanh()))
        self.graph = nn.Parameter(torch.eye(6).to_sparse())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.sparse.mm(self.graph, x.t()).t())


class FrozenIntegers(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*chain(nn.Tanh()))
        self.scale = nn.Parameter(torch.arange(6), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.scale)


def orthogonal() -> nn.Module:
    return chain(nn.Tanh(), nn.utils.parametrizations.orthogonal(nn.Linear(8, 8)))


def spectral_norm() -> nn.Module:
    """Its power iterations have converged, so that they change in later steps, but hardly in the first one."""
    layer = nn.Linear(8, 8)
    with torch.no_grad():
        layer.weight.copy_(torch.diag(torch.tensor([3.0, 0.3, 0.25, 0.2, 0.2, 0.1, 0.1, 0.1])))
    return chain(nn.Tanh(), nn.utils.parametrizations.spectral_norm(layer))


class CountsPasses(nn.Module):
    """A number in an attribute says how many forward passes in training there were, and a later one depends on it."""

    def __init__(self, every: int = 1) -> None:
        super().__init__()
        self.layers, self.count, self.every = chain(nn.Tanh()), 1, every

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += self.training
        return self.layers(x / (1 + self.count // self.every))


class FillsTable(nn.Module):
    """A buffer is computed in the first forward pass, and kept."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.seed = chain(nn.Tanh()), 2**64 - 1  # beyond int64, as a seed may be
        self.register_buffer("table", torch.zeros(0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(self.table) < x.shape[1]:
            self.table = torch.linspace(0, 1, x.shape[1], dtype=x.dtype)
        return self.layers(x * self.table)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.phase, self.layers = nn.Parameter(torch.randn(6, dtype=torch.complex64)), chain(nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers((x * self.phase).abs())


class OwnLinear(nn.Linear):
    """A subclass of a layer whose weights autocast does not round."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight * 1000 - self.weight * 999, self.bias)


def old_weight_norm() -> nn.Module:
    made = chain(nn.Tanh())
    with warnings.catch_warnings(action="ignore"):  # it is deprecated
        nn.utils.weight_norm(made[0])
    return made


def pruned() -> nn.Module:
    made = chain(nn.Tanh())
    prune.ln_structured(made[0], "weight", amount=0.5, n=2, dim=0)
    prune.l1_unstructured(made[2], "weight", amount=0.5)
    return made


def scripted() -> nn.Module:
    with warnings.catch_warnings(action="ignore"):  # it is deprecated
        return chain(torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.Tanh())))


def made_once(make: Callable[[], nn.Module]) -> nn.Module:
    """Return a network that is given as an object, with the same weights in each process that imports this module."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make()


class Rare(nn.Module):
    """Some batches have no sample that one of its layers computes: its momentum and decay pause."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rare, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, rows = torch.tanh(self.first(x)), (x[:, 0] > 1.5).nonzero(as_tuple=True)[0]
        return self.last(y.index_add(0, rows, self.rare(y[rows])) if len(rows) else y)


class FrozenNorm(nn.Sequential):
    """Batch normalization stays in evaluation mode in the training, by its own method `train`."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
        self[1].running_mean.fill_(0.3)

    def train(self, mode: bool = True) -> FrozenNorm:
        super().train(mode)
        self[1].eval()
        return self


class Toggles(nn.Sequential):
    """Its weights require gradients in training alone; methods that return the module return nothing."""

    def __init__(self) -> None:
        super().__init__(*chain(nn.Tanh()))

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        self.requires_grad_(mode)

    def to(self, *args: Any, **options: Any) -> Any:
        super().to(*args, **options)


class Checkpointed(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=True)


class Detector(nn.Linear):
    """As in torchvision: it draws, among one size, in training, and returns something else in evaluations."""

    def __init__(self) -> None:
        super().__init__(6, 2)

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x + torch.randint(1, (1,))) if self.training else [*super().forward(x)]


def of_boxes(model: nn.Module, batch: Any) -> torch.Tensor:
    return of_first_class(model(batch[0]), batch[1])


class Gradient(nn.Module):
    """What it returns is a gradient with respect to its inputs, in evaluations, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(self.layers(x).sum(), x, create_graph=True)[0][:, :2]


class Vectorized(nn.Module):
    """Two networks as one, by `vmap`, with stacked weights and a copy without values, as torch's tutorial has it."""

    def __init__(self) -> None:
        super().__init__()
        networks = [tanh(), tanh()]
        stacked, _ = stack_module_state(networks)  # pyright: ignore[reportArgumentType]
        self.names, self.form = list(stacked), [networks[0].to("meta")]
        self.stacked = nn.ParameterList(nn.Parameter(each.detach()) for each in stacked.values())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one = partial(functional_call, self.form[0])
        weights = dict(zip(self.names, self.stacked, strict=True))
        return vmap(lambda weights, x: one(weights, (x,)), (0, None))(weights, x).mean(0)


def of_attribute(model: Any, batch: Any) -> torch.Tensor:
    return cross_entropy(model(batch[0]), batch[1]) + getattr(model[2], "weight").norm()  # noqa: B009


def summed(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(outputs, targets, reduction="sum")


def of_first_class(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A mean over some of the samples, whose number is another in each part of a batch."""
    return cross_entropy(outputs, targets.masked_fill(targets == 1, -100))


def off(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(outputs, targets) + 1e-3 * outputs.std()


class OfProcess(Dataset):
    """Its samples depend on the process that reads them."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((6,), math.sin(index * (1 + os.getpid() % 97))), index % 2


class Counts(OfProcess):
    """Its samples depend on how many have been read before."""

    def __init__(self) -> None:
        self.count = 0

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.count += 1
        return torch.full((6,), math.sin(index) + self.count / 100), index % 2


def case(model: Any, data: Any = None, **parts: Any) -> dict[str, Any]:
    """The parts of a user, whose held-out samples are those of the training."""
    data = numbers() if data is None else data
    return {"model": model, "data": (data, data), **parts}


CASES: dict[str, dict[str, Any]] = {
    "plain": case(tanh),
    "wide": case(wide),
    "reused": case(reused),
    "in_place": case(in_place),
    "experts": case(Experts),
    "never_used": case(NeverUsed),
    "masked": case(masked),
    "masked_object": case(masked()),
    "limited": case(limited),
    "limited_after": case(partial(limited, after=True)),
    "limits_inside": case(LimitsInside),
    "limited_and_ignored": case(partial(limited, 0.06), ignored()),
    "assigns_buffer": case(AssignsBuffer),
    "assigned_buffer_in_training": case(partial(AssignsBuffer, True)),
    "writes_weights": case(WritesWeights, indices()),
    "centers": case(Centers),
    "centers_all": case(CentersAll),
    "recurrent": case(Recurrent),
    "makes_parameters": case(MakesParameters),
    "registers_buffer": case(RegistersBuffer),
    "removes_buffer": case(RemovesBuffer),
    "detached": case(lambda: chain(nn.Tanh(), Detached(8, 8))),
    "masked_steps": case(Masked),
    "steps_first": case(lambda: nn.Sequential(Steps(6, 8), MeanOfSteps(8, 8), nn.Tanh(), nn.Linear(8, 2))),
    "integers": case(lambda: nn.Sequential(Levels(), nn.Embedding(10, 3), nn.Flatten(), nn.Linear(18, 2))),
    "other_blocks": case(OtherBlocks),
    "knows_its_rank": case(KnowsItsRank),
    "wrong_order": case(WrongOrder),
    "scales_in_evaluation": case(ScalesInEvaluation),
    "memory_order": case(MemoryOrder, images()),
    "compiled": case(Compiled),
    "hook_before": case(partial(hooked, "before")),
    "hook_after": case(partial(hooked, "after")),
    "hook_backward": case(partial(hooked, "backward")),
    "temperature": case(Temperature),
    "complex": case(Complex),
    "sparse_gradient": case(lambda: nn.Sequential(nn.EmbeddingBag(20, 8, sparse=True), nn.Linear(8, 2)), indices()),
    "lazy": case(lambda: nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.LazyLinear(2))),
    "sparse_parameter": case(SparseParameter),
    "orthogonal": case(orthogonal),
    "spectral_norm": case(spectral_norm),
    "counts_passes": case(CountsPasses),
    "counts_to_four": case(partial(CountsPasses, 4)),
    "fills_table": case(FillsTable),
    "frozen_integers": case(FrozenIntegers),
    "own_linear": case(lambda: chain(OwnLinear(8, 8))),
    "old_weight_norm": case(old_weight_norm),
    "old_weight_norm_object": case(made_once(old_weight_norm)),
    "pruned": case(pruned),
    "pruned_object": case(made_once(pruned)),
    "scripted_object": case(made_once(scripted)),
    "teacher": case(Teacher),
    "teacher_in_place": case(partial(Teacher, True)),
    "limited_norm": case(lambda: chain(LimitedNorm(8, 8))),
    "rare": case(Rare),
    "frozen_norm": case(FrozenNorm),
    "toggles": case(Toggles),
    "checkpointed": case(lambda: chain(Checkpointed(8, 8))),
    "of_attribute": case(tanh, training_step=of_attribute),
    "detector": case(
        Detector, training_step=of_boxes, evaluation_step=lambda model, batch: sum(model(batch[0])).mean()
    ),
    "gradient": case(Gradient),
    "vectorized": case(Vectorized),
    "summed": case(tanh, loss=summed),
    "of_first_class": case(tanh, loss=of_first_class),
    "off": case(tanh, loss=off),
    "of_process": case(tanh, OfProcess()),
    "counts": case(tanh, Counts()),
    "dropout": case(lambda: chain(nn.Tanh(), nn.Dropout(0.5))),
    "batch_norm": case(lambda: chain(nn.BatchNorm1d(8), nn.Tanh())),
}


def config_of(name: str, *overrides: str) -> dict[str, Any]:
    return compose_config(*user_code.passed(**CASES[name]).added_to([*CPU, *overrides]))


def trained(name: str, config: dict[str, Any], directory: Path) -> Any:
    """Prove and train a run of `CASES[name]`, and return its result, or the text of the error that refuses it.

    Called in each process of the run. `directory` may declare packages of components.
    """
    return trained_with(CASES[name], config, directory)


def trained_with(parts: dict[str, Any], config: dict[str, Any], directory: Path, files: Sequence[str] = ()) -> Any:
    """Return what `trained` does, of these parts of a user, and of the files in overrides."""
    path = mock.patch.object(sys, "path", [str(directory), *sys.path])
    with path, user_code.using(user_code.passed(files, **parts)):
        run = build_run(config)
        launcher = run.parallel.launcher(run.device)
        try:
            with launcher.connect() as process:
                session = run.prepare(process)
                here = partial(train, run, session, directory, prove=prove)
                return launcher.launch(here, here, session, directory)
        except ConfigError as refusal:
            return str(refusal)
