"""A workload: an autoencoder, which learns to reproduce its input."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn.functional import mse_loss

from runner.batching import Plan
from runner.config.errors import errors_under
from runner.config.limits import PositiveInt
from runner.data.base import Batch, Data
from runner.model.base import Model
from runner.tracking.metrics import MetricSums, batch_sums
from runner.workloads.base import Workload


@dataclass
class Autoencoder(Workload):
    """A network with as many outputs as its input has values; the loss is the mean squared error.

    Args:
        model: chosen by `model=`.
        data: chosen by `data=`; its classes are not used.
        eval_batch_size: samples in one forward pass of an evaluation.
    """

    model: Model
    data: Data
    eval_batch_size: PositiveInt = 256

    train_metrics: ClassVar[tuple[str, ...]] = ("loss",)
    best: ClassVar[tuple[str, str]] = ("loss", "min")

    def prepare(self) -> None:
        with errors_under("data"):
            self.train, self.held_out = self.data.load()

    def describe(self) -> dict[str, str]:
        return {"data": f"{type(self.data).__name__}, {len(self.train):,} training samples"}

    def steps_per_epoch(self, batch_size: int) -> float:
        return len(self.train) / batch_size

    def build_model(self) -> torch.nn.Module:
        return self.model.build(self.train.shape, math.prod(self.train.shape))

    def batches(self, model: torch.nn.Module, plan: Plan, after_step: int, device: torch.device) -> Iterator[Batch]:
        return self.train.batches(plan.stream(after_step), plan.seed, device)

    def loss(self, model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        outputs = model(batch.inputs)
        loss = mse_loss(outputs, batch.inputs.flatten(1).to(outputs.dtype))
        return loss, batch_sums(loss.detach(), loss.new_zeros(len(batch.inputs), 0))

    def evaluate(
        self, infer: Callable[[torch.Tensor], torch.Tensor], shard: tuple[int, int], device: torch.device
    ) -> MetricSums:
        sums = {"loss": torch.zeros((), device=device), "count": torch.zeros((), device=device)}
        for inputs, _ in self.held_out.in_order(self.eval_batch_size, shard, device):
            sums["loss"] += mse_loss(infer(inputs).float(), inputs.flatten(1)) * len(inputs)
            sums["count"] += len(inputs)
        return sums

    def summarize(self, sums: MetricSums) -> dict[str, float]:
        return {"loss": float(sums["loss"] / sums["count"])}
