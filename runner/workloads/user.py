"""The workload of a user's loss and metrics, for `workload=FILE.py` and for the arguments of `runner.train`."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch.nn.functional import cross_entropy, mse_loss

from runner.batching import Plan
from runner.config import user_code
from runner.config.errors import ABSENT, ConfigError, check, did_you_mean, errors_under
from runner.data.base import Batch, LabeledSamples, Samples, copied
from runner.data.memory import ArraySamples
from runner.data.user import DatasetSamples, UserData
from runner.device import sum_dtype
from runner.model.user import UserModel
from runner.storage.signature import OUTPUTS
from runner.tracking.metrics import BatchSums, MetricSums, batch_sums
from runner.workloads.cross_entropy import CrossEntropyWorkload
from runner.workloads.evaluation_metrics import EvaluationMetrics
from runner.workloads.named_metrics import OF_CLASSES_OR_NUMBERS, Named, accuracy, check_names, of_samples
from runner.workloads.supervised import comparable

log = logging.getLogger(__name__)


@dataclass
class UserWorkload(CrossEntropyWorkload[Samples]):
    """A loss, by default cross-entropy for integer targets and the mean squared error for others, and metrics.

    Metrics are named, or those of torchmetrics, or functions of (outputs, targets) of all held-out samples, whose value
    is averaged if it is not a single number. See `conf/workload/_user.yaml`.
    """

    best_goal: Literal["min", "max"] | None = None

    may_change_on_resume: ClassVar[tuple[str, ...]] = ("eval_batch_size", "metrics", "best_metric", "best_goal")
    named_metrics: ClassVar[Mapping[str, Named]] = OF_CLASSES_OR_NUMBERS

    def __post_init__(self) -> None:
        super().__post_init__()
        self._names = [name for name in self.metrics if name != "loss"]
        check_names("metrics", self._names, self.named_metrics, "classes or of numbers")

    @classmethod
    def best_for(cls, options: Mapping[str, Any]) -> tuple[str, str]:
        name = options.get("best_metric") or "loss"
        return name, options.get("best_goal") or (cls.named_metrics[name].goal if name in cls.named_metrics else "min")

    def eval_metrics(self) -> dict[str, str]:
        return {"loss": "min"} | self.extra.goals | dict([self.selection])

    def prepare(self) -> None:
        options = {"model": isinstance(self.model, UserModel), "data": isinstance(self.data, UserData)}
        user_code.check_unused(group for group, is_given in options.items() if is_given)
        super().prepare()

    def usable(self, samples: Samples) -> Samples:
        return samples

    def use(self, train: Samples, held_out: Samples) -> None:
        self._of_classes = not _first(train).targets.is_floating_point()
        given, self._mean_is_checked = user_code.find("loss"), False
        self._loss: Any = copy.deepcopy(given) or (_cross_entropy if self._of_classes else _mean_squared_error)
        check(callable(self._loss), "loss", given, "it is no function of (outputs, targets)", "pass a function")
        if isinstance(given, torch.nn.Module):
            trained, name = any(each.requires_grad for each in given.parameters()), type(given).__name__
            check(not trained, "loss", name, "its parameters would not be trained", "make them a part of the model")
        why, name = "the targets are numbers", getattr(given, "__name__", type(given).__name__)
        if given is not None:
            why = f"it is an option of the default loss, and loss is {name}"
        call = 'cross_entropy(outputs, targets, weight=…, label_smoothing=…, reduction="sum")'
        remedy = f"{call} / len(targets) in the loss"
        for key in ("label_smoothing", "class_weights"):
            is_used = self._loss is _cross_entropy or not getattr(self, key)
            check(is_used, f"workload.{key}", getattr(self, key), why, remedy)
        super().use(train, held_out)
        classes = getattr(train, "class_names", None) or ()
        if not self._of_classes:
            self._num_outputs = _first(train).targets[0].numel()
        elif not classes and isinstance(train, ArraySamples):  # here, as plans build networks without numbers
            both = (samples.targets for samples in (train, held_out) if isinstance(samples, ArraySamples))
            seen = torch.cat([targets.unique() for targets in both]).unique()
            self._num_outputs = 1 + int(seen.max())
            if absent := self._num_outputs - int((seen >= 0).sum()):
                log.warning("data: %d of the %d classes from 0 on have no samples", absent, self._num_outputs)
        else:
            self._num_outputs = len(classes)

    def extra_metrics(self) -> EvaluationMetrics:
        given = user_code.find("metrics")
        if given is None:
            given = {"accuracy": accuracy} if self._loss is _cross_entropy and "accuracy" not in self._names else {}
        why = "it is no dict from names, loss not among them, to functions of (outputs, targets)"
        usable = isinstance(given, Mapping) and "loss" not in given
        check(usable, "metrics", given, why, 'metrics={"accuracy": function}')
        for name, metric in given.items():
            check(isinstance(name, str) and name.strip() != "", "metrics", name, "it is no name", 'metrics={"f1": …}')
            why, remedy = "it is a class, and no metric", f"pass an object of it: {getattr(metric, '__name__', '')}(…)"
            check(not isinstance(metric, type), f"metrics.{name}", metric, why, remedy)
            why, remedy = "it is a collection of several metrics", "give each a name: metrics={**collection}"
            check(not hasattr(metric, "add_metrics"), f"metrics.{name}", type(metric).__name__, why, remedy)
            why, remedy = "it cannot be called with (outputs, targets)", "give a function, or an object with __call__"
            check(callable(metric), f"metrics.{name}", metric, why, remedy)
        named = {name: of_samples(name, self._of_classes) for name in self._names}
        why, remedy = "the file defines a metric of this name", "leave one of the two out"
        check(not {*given} & {*named}, "workload.metrics", self._names, why, remedy)
        why, known = "evaluations do not measure it;", ("loss", *given, *named)
        remedy = did_you_mean(self.best_metric or "", known)
        check(self.best_metric in (None, *known), "workload.best_metric", self.best_metric, why, remedy)
        goals = {name: self.named_metrics[name].goal for name in (*given, *named) if name in self.named_metrics}
        is_known = self.best_goal is not None or self.best_metric in (None, "loss", *goals)
        remedy = f"workload.best_metric={self.best_metric} workload.best_goal=max, or min"
        check(is_known, "workload.best_goal", None, f"whether a high {self.best_metric} is good is not known", remedy)
        return EvaluationMetrics({**given, **named}, goals)

    @property
    def num_outputs(self) -> int:
        why, remedy = "the number of outputs is not known", "pass tensors, or a data set with a list `classes`"
        is_needed = not isinstance(self.model, UserModel) or "num_classes" in self.model.needed_sizes()
        check(self._num_outputs > 0 or not is_needed, "data", ABSENT, why, remedy)
        return self._num_outputs

    def signature(self) -> dict[str, Any]:
        return {"outputs": self._num_outputs} if self._of_classes and self._num_outputs in OUTPUTS else {}

    def continue_with(self, saved: Mapping[str, Any]) -> None:
        super().continue_with(saved)
        self._num_outputs = saved.get("outputs", self._num_outputs)

    def session_with_data(self, saved: Mapping[str, Any], split: str | None, is_other: bool) -> None:
        super().session_with_data(saved, split, is_other)
        self._num_outputs = saved.get("outputs", self._num_outputs)  # these samples may lack the last class

    def describe(self) -> dict[str, str]:
        name = user_code.given().names().get("loss", "that of the file")
        if self._loss in (_cross_entropy, _mean_squared_error):
            name = "cross-entropy, as the targets are integers" if self._of_classes else "mean squared error"
        if hasattr(user_code.find("model"), "training_step"):  # of Lightning
            name += "; what the network defines as training_step is not called"
        return {"data": f"{self.summary()} of {list(self.train.shape)}", "loss": name}

    def input_shape(self) -> tuple[int, ...] | None:
        is_index = not _first(self.train).inputs.is_floating_point() and not isinstance(self.train, LabeledSamples)
        return None if is_index else self.train.shape  # of zeros, which may be no valid index

    def saved_model(self, signature: Mapping[str, Any]) -> torch.nn.Module:
        if isinstance(self.model, UserModel) and not self.model.needed_sizes():
            with errors_under("model"):
                return self.model.build((), 0)
        return super().saved_model(signature)

    def criterion(self, outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        return self._loss_by(self._cross_entropy if self._loss is _cross_entropy else self._loss, outputs, targets)

    def _cross_entropy(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        _check_classes(outputs, targets)
        self.check_num_classes(outputs.shape[1])
        return self.cross_entropy(outputs, targets.long())

    def _loss_by(self, function: Any, outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        if not isinstance(outputs, torch.Tensor) and self._loss in (_cross_entropy, _mean_squared_error):
            why = f"it returns a {type(outputs).__name__}, and the default loss is that of a tensor"
            raise ConfigError("model", ABSENT, why, "return a tensor, or pass a loss")
        loss = function(*comparable(outputs, targets))
        if not isinstance(loss, torch.Tensor) or loss.dim():
            found = f"a tensor {list(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
            why = f"it returns {found}, and no scalar{user_code.place(self._loss)}"
            raise ConfigError("loss", ABSENT, why, "return the mean over the samples, a tensor without dimensions")
        return loss

    def loss_of(self, outputs: Any, targets: torch.Tensor) -> tuple[torch.Tensor, BatchSums]:
        loss = self.criterion(outputs, targets)
        return loss, batch_sums(loss.detach(), loss.detach().new_zeros(len(targets), 0))

    def loss_module(self) -> torch.nn.Module | None:
        return self._loss if isinstance(self._loss, torch.nn.Module) else None

    def batches(self, model: torch.nn.Module, plan: Plan, after_step: int, device: torch.device) -> Iterator[Batch]:
        if isinstance(self._loss, torch.nn.Module):  # it may have class weights, for example
            self._loss.to(device, next((each.dtype for each in model.parameters()), torch.float32))
        return super().batches(model, plan, after_step, device)

    @contextmanager
    def few_samples(self, count: int, device: torch.device) -> Iterator[None]:
        held_out, loss, checked = self.held_out, self._loss, self._mean_is_checked
        is_array = isinstance(held_out, ArraySamples)
        some = next(iter(held_out.in_order(count, (0, 1), device))) if is_array else _first(held_out)
        inputs, targets = (each[torch.arange(count) % len(each)].to(device) for each in some)  # copies
        self.held_out, self._loss, self._mean_is_checked = ArraySamples(inputs, targets), copy.deepcopy(loss), True
        try:
            with self.extra.trial():
                yield
        finally:
            self.held_out, self._loss, self._mean_is_checked = held_out, loss, checked

    def evaluate(
        self, infer: Callable[[torch.Tensor], Any], shard: tuple[int, int], device: torch.device
    ) -> MetricSums:
        sums: MetricSums = {"loss": torch.zeros((), dtype=sum_dtype(device), device=device)}
        sums["count"], tally = torch.zeros((), dtype=torch.int64, device=device), self.extra.start(device)
        for batch in self.held_out.in_order(self.eval_batch_size, shard, device):
            outputs, targets = comparable(infer(batch.inputs), batch.targets)
            if isinstance(self._loss, torch.nn.Module):
                self._loss.to(outputs if isinstance(outputs, torch.Tensor) else device)
            if not self._mean_is_checked:
                self._check_mean(outputs, targets)
            sums["loss"] += self._loss_by(self._loss, *copied((outputs, targets))) * len(targets)
            sums["count"] += len(targets)
            tally.update(outputs, targets)
        return sums | tally.sums()

    def summarize(self, sums: MetricSums) -> dict[str, float]:
        extra = self.extra.compute(sums, sums["loss"].device)
        return {"loss": float(sums["loss"]) / int(sums["count"]), **extra}

    def _check_mean(self, outputs: Any, targets: torch.Tensor) -> None:
        """Warn, once, if the loss of a batch is not the mean of the losses of its halves."""
        n, half = len(targets), len(targets) // 2
        if not half or not isinstance(outputs, torch.Tensor):
            return
        self._mean_is_checked = True
        rows = slice(n), slice(half), slice(half, n)
        whole, first, second = (
            float(self._loss_by(self._loss, *copied((outputs[part], targets[part])))) for part in rows
        )
        mean = (half * first + (n - half) * second) / n
        if math.isfinite(whole) and math.isfinite(mean) and not math.isclose(whole, mean, rel_tol=1e-4, abs_tol=1e-7):
            text = "the loss of %d samples is %.6g, but the mean over its halves %.6g: it is no mean over samples, and "
            text += "accumulation or several processes change it (with class weights: divide by the number of samples)"
            log.warning(text, n, whole, mean)


def _first(samples: Samples) -> Batch:
    """Return the first sample as a batch; of images in files, which are not read, zeros."""
    if isinstance(samples, DatasetSamples):
        return samples.example
    if isinstance(samples, ArraySamples):
        return Batch(samples.inputs[:1], samples.targets[:1])
    return Batch(torch.zeros(1, *samples.shape), torch.zeros(1, dtype=torch.int64))


def _cross_entropy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    _check_classes(outputs, targets)
    # Not the mean, which depends on how a batch is divided if some targets are -100, and ignored.
    return cross_entropy(outputs, targets.long(), reduction="sum") / targets.numel()


def _mean_squared_error(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    _check_shapes(outputs.shape == targets.shape, outputs, targets, "they would be broadcast to each other")
    return mse_loss(outputs, targets)


def _check_classes(outputs: torch.Tensor, targets: torch.Tensor) -> None:
    fits = outputs.dim() > 1 and targets.shape == (*outputs.shape[:1], *outputs.shape[2:])
    _check_shapes(fits, outputs, targets, "class indices [n, …] need outputs [n, num_classes, …]")


def _check_shapes(fits: bool, outputs: torch.Tensor, targets: torch.Tensor, why: str) -> None:
    if not fits:
        shapes = f"outputs have the shape {list(outputs.shape)}, targets {list(targets.shape)}"
        raise ConfigError("data", ABSENT, f"{shapes}: {why}", "change the network or the targets, or pass a loss")
