"""Supervised learning: a network that is trained on the samples of a data set."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from runner.config.errors import check, did_you_mean
from runner.data.base import Batch, Samples
from runner.system.trees import Tree, call, map_tensors, tensors_of
from runner.tracking.metrics import BatchSums, batch_sums
from runner.workloads.base import Workload
from runner.workloads.evaluation_metrics import EvaluationMetrics
from runner.workloads.named_metrics import Named, check_names
from runner.workloads.samples import S, SampleWorkload


@dataclass
class SupervisedWorkload(Workload):
    """A workload whose loss is `criterion(model(inputs), targets)` of a `Batch`, so that its network can be split."""

    @abstractmethod
    def criterion(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, Any]:
        """Return the mean loss of the n samples of `outputs` and `targets`, both [n, …], a scalar; or (sum, count)."""

    def sample_metrics(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the `train_metrics` of each sample except the loss, [n, number of them]; tensors are detached."""
        return outputs.new_zeros(len(outputs), 0)

    def loss_of(self, outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, BatchSums]:
        """Return the loss per sample and the metric sums of a micro-batch, given the outputs of the network."""
        loss, metrics = self.criterion(outputs, targets), self.sample_metrics(outputs.detach(), targets)
        total, count = loss if isinstance(loss, tuple) else (loss, None)
        loss = total if count is None else total / len(metrics)
        return loss, batch_sums(loss.detach(), metrics, count)

    def loss(self, model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, BatchSums]:
        return self.loss_of(call(model, batch.inputs), batch.targets)


@dataclass
class DataWorkload(SupervisedWorkload, SampleWorkload[S]):
    """A supervised workload whose batches come from a data set.

    The attribute `extra` holds the metrics that evaluations measure besides those of the workload itself.
    """

    metrics: tuple[str, ...] = ()
    best_metric: str | None = None

    may_change_on_resume: ClassVar[tuple[str, ...]] = ("eval_batch_size", "metrics")
    named_metrics: ClassVar[Mapping[str, Named]] = {}
    """What the option `metrics` may name."""

    def __post_init__(self) -> None:
        self.extra = EvaluationMetrics({})  # until the data is loaded
        self._names = [name for name in self.metrics if name not in self.eval_metrics()]
        check_names("metrics", self._names, self.named_metrics, type(self).__name__)
        measured = [*self.eval_metrics(), *self.metrics]
        why, remedy = "evaluations do not measure it;", did_you_mean(self.best_metric or "", measured)
        check(self.best_metric in (None, *measured), "best_metric", self.best_metric, why, remedy)

    @classmethod
    def best_for(cls, options: Mapping[str, Any]) -> tuple[str, str]:
        if not (name := options.get("best_metric")):
            return cls.best
        named = cls.named_metrics.get(name)
        return name, named.goal if named else "max" if cls.best_possible.get(name) else "min"

    def extra_metrics(self) -> EvaluationMetrics:
        """Return the metrics that evaluations measure besides those of the workload; called once the data is loaded."""
        chosen = {name: self.named_metrics[name] for name in self._names}
        functions = {name: each.function for name, each in chosen.items()}
        return EvaluationMetrics(functions, {name: each.goal for name, each in chosen.items()})

    def use(self, train: Samples, held_out: Samples) -> None:
        super().use(train, held_out)
        self.extra = self.extra_metrics()


def comparable(outputs: Tree, targets: Tree) -> tuple[Tree, Tree]:
    """Return outputs and targets with their floating-point tensors in at least float32: 16 bits are too few.

    Targets in floating point have the dtype of the outputs, if these are one tensor, or all in float64.
    """
    if any(_at_least_float32(each) is not each for each in tensors_of(outputs)):
        outputs = map_tensors(_at_least_float32, outputs)  # of a dataclass, a copy, which torch cannot compile
    dtypes = {each.dtype for each in tensors_of(outputs) if each.is_floating_point()}
    dtype = dtypes.pop() if dtypes and (isinstance(outputs, torch.Tensor) or dtypes == {torch.float64}) else None

    def converted(target: torch.Tensor) -> torch.Tensor:
        if target.dtype == torch.bool or target.is_complex():
            return target
        if not target.is_floating_point():
            return target.long()  # losses take no other integers
        return target.to(dtype) if dtype else target

    return outputs, map_tensors(converted, targets)


def _at_least_float32(value: torch.Tensor) -> torch.Tensor:
    is_real = value.is_floating_point()
    return value.to(torch.promote_types(value.dtype, torch.float32)) if is_real else value
