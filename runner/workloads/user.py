"""The workload of a user's loss and metrics, for `workload=FILE.py` and for the arguments of `runner.train`."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch.nn.functional import mse_loss

from runner.batching import Plan
from runner.config import functions, user_code
from runner.config.errors import ABSENT, ConfigError, check, described
from runner.data.base import IGNORED, Batch, CollatedBatch, LabeledSamples, Samples, copied, num_samples_of
from runner.data.memory import ArraySamples
from runner.model.user import UserModel
from runner.storage.signature import OUTPUTS
from runner.system.trees import Tree, call, is_double, map_tensors, num_rows, rows_of, tensors_of
from runner.tracking.metrics import BatchSums, MetricSums
from runner.workloads.cross_entropy import CrossEntropyWorkload
from runner.workloads.evaluation_metrics import EvaluationMetrics
from runner.workloads.losses import SUM, Losses, added, as_sum, losses_of, means_of, summed_cross_entropy
from runner.workloads.named_metrics import check_names, of_samples
from runner.workloads.supervised import comparable
from runner.workloads.user_base import UserCodeWorkload

log = logging.getLogger(__name__)

_LOSSES = ("training_step", "compute_loss", "loss_function", "loss_fn", "criterion")
"""What networks of users call their losses."""


@dataclass
class UserWorkload(UserCodeWorkload, CrossEntropyWorkload[Samples]):
    """A loss, by default cross-entropy for integer targets and the mean squared error for others, and metrics.

    Metrics are named, or those of torchmetrics, or functions of (outputs, targets) of all held-out samples, whose value
    is averaged if it is not a single number. See `conf/workload/_user.yaml`.
    """

    may_change_on_resume: ClassVar[tuple[str, ...]] = ("eval_batch_size", "metrics", "best_metric", "best_goal")
    code_parts: ClassVar[tuple[str, ...]] = ("loss", "metrics")

    def __post_init__(self) -> None:
        self._measures_accuracy = False  # without being asked; until the data is loaded
        super().__post_init__()
        self._names = [name for name in self.metrics if name != "loss"]
        check_names("metrics", self._names, self.named_metrics, "classes or of numbers")

    def eval_metrics(self) -> dict[str, str]:
        accuracy = {"accuracy": "max"} if self._measures_accuracy else {}
        return {"loss": "min"} | accuracy | self.extra.goals | dict([self.selection])

    def use(self, train: Samples, held_out: Samples) -> None:
        targets = _first(train).targets
        is_one = isinstance(targets, torch.Tensor)
        self._of_classes = is_one and not (targets.is_floating_point() or targets.is_complex())
        given, self._mean_is_checked = user_code.find("loss"), False
        why, remedy = "the targets are several tensors", "def loss(outputs, targets): …"
        check(is_one or given is not None, "loss", ABSENT, why, remedy)
        others = any(each.is_floating_point() for each in tensors_of(_first(held_out).targets))
        why = "targets of training samples are integers or booleans, and those of held-out ones floating-point numbers"
        same = "encode the targets of both in the same way"
        check(given is not None or not (self._of_classes and others), "data", ABSENT, why, same)
        own = functions.own_copy("loss", given, "pass a function of (outputs, targets) that calls it")
        self._loss: Any = own or (_cross_entropy if self._of_classes else _mean_squared_error)
        check(callable(self._loss), "loss", given, "it is no function of (outputs, targets)", "pass a function")
        functions.check_order("loss", self._loss)
        if isinstance(given, torch.nn.Module):
            trained, name = any(each.requires_grad for each in given.parameters()), type(given).__name__
            remedy = f'def model(): return nn.ModuleDict({{"net": …, "loss": {name}(…)}}), and in place of loss: '
            remedy += 'def training_step(model, batch): return model["loss"](model["net"](batch[0]), batch[1])'
            check(not trained, "loss", name, "its parameters would not be trained", remedy)
        why, name = "the targets are numbers", getattr(given, "__name__", type(given).__name__)
        if given is not None:
            why = f"it is an option of the default loss, and loss is {name}"
        remedy = "in the loss: cross_entropy(outputs, targets, weight=…, label_smoothing=…)"
        for key in ("label_smoothing", "class_weights"):
            is_used = self._loss is _cross_entropy or not getattr(self, key)
            check(is_used, f"workload.{key}", getattr(self, key), why, remedy)
        self._as_sum = as_sum(self._loss)
        # No target has another weight in the mean than a sample, as far as is known without reading them.
        is_plain = self._loss is _cross_entropy and self._weights is None and targets.dim() == 1
        self._is_mean = is_plain and isinstance(train, ArraySamples) and bool((train.targets >= 0).all())
        named = "accuracy" in self._names or user_code.find("metrics") is not None
        self._measures_accuracy = self._loss is _cross_entropy and not named
        self._form: tuple[tuple[str, ...], bool] | None = None
        super().use(train, held_out)
        if not self._of_classes:
            self._num_outputs = targets[0].numel() if is_one else 0
        elif not self._num_outputs and isinstance(train, ArraySamples):  # here, as plans build networks without numbers
            both = [samples for samples in (train, held_out) if isinstance(samples, ArraySamples)]
            tokens = [samples.inputs for samples in both] if self.model.takes_tokens else []  # of the same vocabulary
            seen = torch.cat([each.unique() for each in (*tokens, *(samples.targets for samples in both))]).unique()
            self._num_outputs = 1 + int(seen.max())
            if absent := self._num_outputs - int((seen >= 0).sum()):
                log.warning("data: %d of the %d classes from 0 on have no samples", absent, self._num_outputs)

    def build_model(self) -> torch.nn.Module:
        model = super().build_model()
        is_default = isinstance(self.model, UserModel) and user_code.find("loss") is None
        found = [name for name in _LOSSES if is_default and hasattr(model, name)]
        why = f"it has {', '.join(found)}, which would not be called, and no loss is given"
        remedy = "define loss in the file; or training_step(model, batch), which calls it"
        check(not found, "model", type(model).__name__, why, remedy)
        return model

    def extra_metrics(self) -> EvaluationMetrics:
        given = {} if (found := user_code.find("metrics")) is None else found
        given = dict(given.items()) if hasattr(given, "add_metrics") else given  # a collection of torchmetrics
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
            functions.check_order(f"metrics.{name}", metric)
        named = {name: of_samples(name, self._of_classes) for name in self._names}
        why, remedy = "the file defines a metric of this name", "leave one of the two out"
        check(not {*given} & {*named}, "workload.metrics", self._names, why, remedy)
        goals = {name: self.named_metrics[name].goal for name in (*given, *named) if name in self.named_metrics}
        return EvaluationMetrics({**given, **named}, goals)

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
        shape = self.train.shape
        return {"data": f"{self.summary()} of {list(shape) if isinstance(shape, tuple) else shape}", "loss": name}

    def input_shape(self) -> tuple[int, ...] | None:
        inputs = _first(self.train).inputs
        is_one = isinstance(inputs, torch.Tensor) and (
            inputs.is_floating_point() or isinstance(self.train, LabeledSamples)
        )
        return self.train.shape if is_one else None  # zeros may be no valid index

    def criterion(self, outputs: Tree, targets: Tree) -> Any:
        """Return what the loss returns: a mean over samples, or (sum, count), or a dict of these."""
        if self._loss is not _cross_entropy or not isinstance(outputs, torch.Tensor):
            return self._given(outputs, targets)
        outputs, targets = comparable(outputs, targets)
        _check_classes(outputs, targets)
        self.check_num_classes(outputs.shape[1])
        total, count = self.cross_entropy(outputs, targets.long())
        return total / len(targets) if self._is_mean else (total, count)

    def _given(self, outputs: Tree, targets: Tree) -> Any:
        """Return what the loss returns without options, as in evaluations."""
        if not isinstance(outputs, torch.Tensor) and self._loss in (_cross_entropy, _mean_squared_error):
            why = f"it returns a {type(outputs).__name__}, and the default loss is that of a tensor"
            remedy = "return a tensor, or pass a loss; for a loss that it returns, define training_step(model, batch)"
            raise ConfigError("model", ABSENT, why, remedy)
        both = comparable(outputs, targets)
        return self._as_sum(self._loss, *both) if self._as_sum else self._loss(*both)

    def _evaluated(self, both: tuple[Tree, Tree], count: int) -> Losses:
        return losses_of(self._given(*both), count, self._loss, self._batch_size)

    def outputs(self, model: torch.nn.Module, inputs: Tree) -> Any:
        try:
            return super().outputs(model, inputs)
        except TypeError as error:
            each = inputs.values() if isinstance(inputs, Mapping) else [inputs]
            lists = [parts for parts in each if isinstance(parts, list)]
            if any(all(isinstance(part, torch.Tensor) and part.dim() == 1 for part in parts) for parts in lists):
                why = f"it raises {described(error)}: of a list of numbers in a sample, torch makes a tensor for each"
                remedy = "return tensors: torch.tensor(numbers), or with_format('torch') of Hugging Face"
                raise ConfigError("model", ABSENT, why, remedy) from error
            raise

    @property
    def loss_form(self) -> tuple[tuple[str, ...], bool] | None:
        return self._form

    def loss(self, model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, BatchSums]:
        return self.loss_of(call(model, batch.inputs), batch.targets, num_samples_of(batch))

    def loss_of(self, outputs: Tree, targets: Tree, count: int | None = None) -> tuple[torch.Tensor, BatchSums]:
        returned, count = self.criterion(outputs, targets), count or num_rows(targets)
        found = losses_of(returned, count, self._loss, self._batch_size)
        self._form = found.checked_form(self._form, self._loss)
        return found.per_sample, found.sums

    @property
    def user_loss(self) -> Any:
        return self._loss

    def loss_module(self) -> torch.nn.Module | None:
        return self._loss if isinstance(self._loss, torch.nn.Module) else None

    def batches(self, model: torch.nn.Module, plan: Plan, after_step: int, device: torch.device) -> Iterator[Batch]:
        if isinstance(self._loss, torch.nn.Module):  # it may have class weights, for example
            self._loss.to(device, torch.float64 if is_double(model) else torch.float32)
        return super().batches(model, plan, after_step, device)

    @contextmanager
    def few_samples(self, count: int, device: torch.device) -> Iterator[None]:
        held_out, loss, checked = self.held_out, self._loss, self._mean_is_checked
        is_array = isinstance(held_out, ArraySamples)
        several: Any = held_out
        if isinstance(held_out.example, CollatedBatch):  # whose tensors may have other rows than those of samples
            batch = next(iter(held_out.in_order(count, (0, 1), device)))
            several = SimpleNamespace(in_order=lambda *_: iter([copied(batch)]))  # for every shard
        else:
            some = next(iter(held_out.in_order(count, (0, 1), device))) if is_array else _first(held_out)
            rows = torch.arange(count) % num_rows(some.targets)
            several = ArraySamples(*map_tensors(lambda each: each[rows].to(device), some))  # copies
        self.held_out, self._loss, self._mean_is_checked = several, copy.deepcopy(loss), True
        try:
            with self.extra.trial():
                yield
        finally:
            self.held_out, self._loss, self._mean_is_checked = held_out, loss, checked

    def all_samples(self) -> AbstractContextManager[None] | None:
        return self.extra.trial(of_all=True) if self.extra.needs_more else None

    def evaluate(self, infer: Callable[[Tree], Any], shard: tuple[int, int], device: torch.device) -> MetricSums:
        sums: dict[str, torch.Tensor] = {}
        tally = self.extra.start(device)
        for batch in self.held_out.in_order(self.eval_batch_size, shard, device):
            outputs, targets = comparable(infer(batch.inputs), batch.targets)
            if isinstance(self._loss, torch.nn.Module):
                self._loss.to(device)
            count = num_samples_of(batch)
            found = self._evaluated(copied((outputs, targets)), count)
            if not self._mean_is_checked and not found.has_own_count:
                self._check_mean(found, outputs, targets, count)
            values = found.by_name()
            if self._measures_accuracy:
                valid = targets != IGNORED
                right = (outputs.argmax(1) == targets) & valid
                values["accuracy"] = torch.stack((right.sum(), valid.sum())).to(found.sums.dtype)
            sums = added(sums, values)
            tally.update(outputs, targets)
        # In a list, as a process without samples does not know the names.
        return {"losses": [sums], **tally.sums()}

    def summarize(self, sums: MetricSums) -> dict[str, float]:
        means = means_of(sums["losses"])
        why, remedy = "the loss returns a value of the same name as a metric", "rename one of them"
        check(not means.keys() & {*self.extra.names}, "metrics", sorted(self.extra.names), why, remedy)
        device = next((each.device for part in sums["losses"] for each in part.values()), torch.device("cpu"))
        means |= self.extra.compute(sums, device)
        self.check_best(means)
        return means

    def _check_mean(self, found: Losses, outputs: Tree, targets: Tree, n: int) -> None:
        """Warn, once, if the loss of a batch is not the mean of the losses of its halves."""
        half, both = n // 2, (outputs, targets)
        if not half or any(len(each) != n for each in tensors_of(both) if each.dim()):
            return
        self._mean_is_checked = True
        halves = (((first, last), copied(rows_of(both, first, last))) for first, last in ((0, half), (half, n)))
        first, second = (self._evaluated(each, last - first) for (first, last), each in halves)
        whole, parts = (float(each[0, 0]) / n for each in (found.sums, first.sums + second.sums))
        if math.isfinite(whole) and math.isfinite(parts) and not math.isclose(whole, parts, rel_tol=1e-4, abs_tol=1e-7):
            text = "the loss of %d samples is %.6g, but the mean over its halves %.6g: it is no mean over samples, and "
            text += "accumulation or several processes change it: return (sum, count), such as of tokens or weights"
            total = float(first.sums[0, 0]) / half + float(second.sums[0, 0]) / (n - half)
            more = "; " + SUM.format("loss") if math.isclose(whole, total, rel_tol=1e-4) else ""
            log.warning(text + more, n, whole, parts)


def _first(samples: Samples) -> Any:
    """Return the first sample as a batch; of images in files, which are not read, zeros."""
    return samples.example or next(samples.in_order(1, (0, 1), torch.device("cpu")))


def _cross_entropy(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    _check_classes(outputs, targets)
    return summed_cross_entropy(outputs, targets.long())


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
