"""Parallel modes and workloads for the tests of `runner verify`: most have one error, and some are correct."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from runner.batching import MicroBatch, Plan
from runner.data.base import Batch
from runner.optimizer import trainable
from runner.parallel.base import Parallel
from runner.parallel.full_state import TensorDict
from runner.parallel.multiprocess import MultiProcess
from runner.parallel.session import Session
from runner.tracking.metrics import BatchSums, MetricSums, batch_sums
from runner.workloads.classifier import Classifier


def declare(directory: Path, monkeypatch: Any) -> None:
    """Declare `helpers`, by files in `directory`, as a package of components, so that configs may use those below."""
    (info := directory / "helpers-1.dist-info").mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: helpers\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[runner.components]\nhelpers = helpers.incorrect_modes\n")
    monkeypatch.syspath_prepend(str(directory))


@dataclass
class Replicas(MultiProcess):
    """Correct: a replica per process, whose gradients are summed over the processes."""

    def divide(self, session: Session) -> Plan:
        return session.plan.sharded(session.rank, session.world_size)

    def accumulate(self, model: nn.Module, batch: Any, micro: MicroBatch, log_due: bool) -> BatchSums | None:
        sums = super().accumulate(model, batch, micro, log_due)
        if micro.is_last:
            self.reduce([p.grad for p in trainable(model) if p.grad is not None])
        return sums

    def reduce(self, gradients: list[torch.Tensor]) -> None:
        for gradient in gradients:
            torch.distributed.all_reduce(gradient)


@dataclass
class NoAllReduce(Replicas):
    def reduce(self, gradients: list[torch.Tensor]) -> None:
        pass


@dataclass
class ReducesOnce(Replicas):
    _done = False

    def reduce(self, gradients: list[torch.Tensor]) -> None:
        if not self._done:
            super().reduce(gradients)
        self._done = True


@dataclass
class ClipsLocally(Replicas):
    def reduce(self, gradients: list[torch.Tensor]) -> None:
        norm = torch.nn.utils.get_total_norm(gradients)
        for gradient in gradients:
            gradient *= (0.1 / (norm + 1e-6)).clamp(max=1)
        super().reduce(gradients)

    def clip_gradients(self, model: nn.Module, max_norm: float | None) -> torch.Tensor:
        return super().clip_gradients(model, None)


@dataclass
class RoundsGradients(Replicas):
    def reduce(self, gradients: list[torch.Tensor]) -> None:
        for gradient in gradients:
            gradient.copy_(gradient.bfloat16())
        super().reduce(gradients)


@dataclass
class SavesRoundedBuffers(Replicas):
    def full_state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[TensorDict, dict[str, Any]]:
        tensors, state = super().full_state(model, optimizer)
        buffers = {name for name, _ in model.named_buffers()}
        return {n: t.half().to(t.dtype) if n in buffers else t for n, t in tensors.items()}, state


@dataclass
class EvaluatesOneShard(Replicas):
    """Evaluation metrics are not reduced: rank 0 returns those of its own shard."""

    def evaluate(self, model: nn.Module) -> tuple[dict[str, float], MetricSums]:
        with torch.inference_mode():
            shard, device = self._session.plan.eval_shard, self._session.device
            sums = self._session.workload.evaluate(model, shard, device)
        return self._session.workload.summarize(sums), sums


@dataclass
class UnequalShards(Replicas):
    """The processes take a quarter and three quarters of the batch, but weight their mean losses equally."""

    def divide(self, session: Session) -> Plan:
        return dataclasses.replace(session.plan, eval_shard=(session.rank, session.world_size))

    def accumulate(self, model: nn.Module, batch: Any, micro: MicroBatch, log_due: bool) -> BatchSums | None:
        cut = len(batch.targets) // 4
        part = slice(None, cut) if self._session.rank == 0 else slice(cut, None)
        own = Batch(batch.inputs[part], batch.targets[part])
        return super().accumulate(model, own, micro._replace(weight=micro.weight / 2), log_due)


@dataclass
class DropsLastMicroBatch(Parallel):
    def accumulate(self, model: nn.Module, batch: Any, micro: MicroBatch, log_due: bool) -> BatchSums | None:
        weight = 0.0 if micro.is_last else micro.weight
        return super().accumulate(model, batch, micro._replace(weight=weight), log_due)


@dataclass
class PermutesTargets(Parallel):
    def accumulate(self, model: nn.Module, batch: Any, micro: MicroBatch, log_due: bool) -> BatchSums | None:
        return super().accumulate(model, Batch(batch.inputs, batch.targets.roll(1)), micro, log_due)


@dataclass
class ShufflesWithOwnSeed(Classifier):
    def batches(self, model: nn.Module, plan: Plan, after_step: int, device: torch.device) -> Iterator[Batch]:
        return super().batches(model, dataclasses.replace(plan, seed=plan.seed + plan.data_rank), after_step, device)


class RunningMean(nn.Linear):
    """A linear classifier that subtracts the running mean of its inputs, but only in evaluations."""

    def __init__(self, size: int, num_classes: int):
        super().__init__(size, num_classes)
        self.register_buffer("mean", torch.zeros(size))
        self.mean: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(1)
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.1)
        return super().forward(x if self.training else x - self.mean)


@dataclass
class WithRunningMean(Classifier):
    """Correct: a workload whose network has a buffer that depends on the samples."""

    def build_model(self) -> nn.Module:
        return RunningMean(math.prod(self.train.shape), self.train.num_classes)


class Float32Linear(nn.Linear):
    """A linear classifier that computes in float32; with a large `scale`, rounding hides its outputs."""

    def __init__(self, size: int, num_classes: int, scale: float):
        super().__init__(size, num_classes)
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs = nn.functional.linear(x.flatten(1).float(), self.weight.float(), self.bias.float())
        return (outputs + self.scale - self.scale).to(self.weight.dtype)


@dataclass
class Float32(Classifier):
    """Correct, but its network computes in float32 in every precision."""

    scale: float = 1.0

    def build_model(self) -> nn.Module:
        return Float32Linear(math.prod(self.train.shape), self.train.num_classes, self.scale)


@dataclass
class Float32OwnSeed(Float32, ShufflesWithOwnSeed):
    pass


class ChaoticNet(nn.Linear):
    """A network that amplifies differences in the last bit of float32 to the size of its outputs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(1e9 * super().forward(x.flatten(1)))


@dataclass
class AmplifiesRounding(Classifier):
    """Correct, but even on a single device, its rounding errors are too large to compare results."""

    def build_model(self) -> nn.Module:
        return ChaoticNet(math.prod(self.train.shape), self.train.num_classes)


@dataclass
class OpaqueOwnSeed(ShufflesWithOwnSeed):
    """Like `ShufflesWithOwnSeed`, but neither the batches nor the losses per sample can be observed."""

    def batches(self, model: nn.Module, plan: Plan, after_step: int, device: torch.device) -> Iterator[Any]:
        return (lambda batch=batch: batch for batch in super().batches(model, plan, after_step, device))

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = batch()
        outputs = model(inputs)
        loss = self.criterion(outputs, targets)
        return loss, batch_sums(loss.detach(), self.sample_metrics(outputs.detach(), targets))


@dataclass
class Diverges(Classifier):
    def criterion(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return super().criterion(outputs, targets) / 0


@dataclass
class Crashes(Parallel):
    def accumulate(self, model: nn.Module, batch: Any, micro: MicroBatch, log_due: bool) -> BatchSums | None:
        raise ZeroDivisionError
