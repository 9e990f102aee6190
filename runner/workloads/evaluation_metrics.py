"""Evaluation metrics besides those of a workload: functions of all held-out samples, or objects of torchmetrics."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import torch

from runner.config import functions
from runner.config.errors import ABSENT, ConfigError, described
from runner.data.base import copied
from runner.device import sum_dtype
from runner.system.trees import Tree, leaves_of, map_leaves, num_rows, tensors_of
from runner.tracking.metrics import MetricSums

Metric: TypeAlias = Callable[..., Any]
"""A `torchmetrics.Metric`, or a function of (outputs, targets) of all samples, whose value is averaged if need be."""

Kept: TypeAlias = "tuple[int, list[Any]]"
"""The number of samples of a batch, and the leaves of its outputs and targets."""

log = logging.getLogger(__name__)

_KEY = "evaluation_metrics"  # in the metric sums
_MISTAKES = AttributeError, ImportError, KeyError, NameError, NotImplementedError, TypeError


class EvaluationMetrics:
    """The metrics of an evaluation by name, whose values are those of all held-out samples at once.

    A workload calls `start` and `Tally.update` in `evaluate`, and adds `Tally.sums` to its metric sums, which the mode
    combines; `summarize` calls `compute`. The outputs and the targets of all samples are kept, unless all metrics are
    objects of torchmetrics whose states can be added (see `Tally`). No sample counts twice.

    Args:
        metrics: the metrics by name. They are not changed: each evaluation computes with copies of them, so that its
            values depend on its samples alone.
        goals: `min` or `max` of each metric by which a run may end early.
    """

    def __init__(self, metrics: Mapping[str, Metric], goals: Mapping[str, str] = {}):
        self._metrics, self._warned, self.goals = dict(metrics), set[tuple[str, str]](), dict(goals)
        self._like: Any = None  # outputs and targets of a batch, for their structure
        self._is_trial = self._are_few = False
        self.needs_more = False
        """Whether a metric could not be computed of the few samples of the last trial."""

    @contextmanager
    def trial(self, of_all: bool = False) -> Iterator[None]:
        """A context in which an evaluation of a few samples, or of all, shows mistakes before the first step.

        A metric that cannot be computed of a few is NaN, as they may lack what it needs, such as samples of all
        classes. But `ConfigError` is raised if it uses a name, an attribute, a key or an argument that does not exist,
        is no number, or is an object of torchmetrics that does not take such outputs and targets.
        """
        self._is_trial, self._are_few, self.needs_more = True, not of_all, False
        try:
            with warnings.catch_warnings(action="ignore"):
                yield
        finally:
            self._is_trial = False

    def without(self, names: Container[str]) -> EvaluationMetrics:
        """Return the metrics but those with `names`, which the caller computes; the goals are the same."""
        return EvaluationMetrics({name: each for name, each in self._metrics.items() if name not in names}, self.goals)

    def start(self, device: torch.device) -> Tally:
        """Return a tally without samples, whose states are on `device`."""
        return Tally(self, device)

    @property
    def names(self) -> list[str]:
        return [*self._metrics]

    def merged(self, device: torch.device) -> dict[str, Any]:
        """Return objects of torchmetrics to count batches in, if the states of all can be added; or an empty dict."""
        all_merge = all(_merges(metric) for metric in self._metrics.values())
        return {name: _fresh(metric, device) for name, metric in self._metrics.items()} if all_merge else {}

    def compute(self, sums: MetricSums, device: torch.device) -> dict[str, float]:
        """Return the value of each metric, computed on `device`, given the metric sums over all ranks.

        Raises:
            ConfigError: if the value of a metric is neither a number nor an array of numbers.
        """
        parts, values = sums.get(_KEY, []), {}
        samples = self.joined([batch for part in parts for batch in part["samples"]], device)
        for name, metric in self._metrics.items():
            states = [part["states"][name] for part in parts if name in part["states"]]
            with warnings.catch_warnings(record=True, action="always") as said:
                values[name] = self._value(name, metric, states, samples, device)
            for text in (str(each.message) for each in said):  # such as of a class without samples
                is_new = (name, text) not in self._warned and not self._is_trial
                if is_new and not text.startswith("The ``compute`` method"):
                    log.warning("eval/%s: %s", name, text)
                    self._warned.add((name, text))
        return values

    def _value(
        self, name: str, metric: Metric, states: list[Any], samples: tuple[Any, Any] | None, device: torch.device
    ) -> float:
        try:
            with torch.no_grad():
                if hasattr(metric, "merge_state"):
                    whole = _fresh(metric, device)
                    for state in reversed(states):  # `merge_state` puts the samples of the argument first
                        whole.merge_state(map_leaves(partial(torch.Tensor.to, device=device), state))
                    if samples is not None:
                        self.update(name, whole, *samples)
                    value = whole.compute()
                else:
                    value = self._called(name, metric, samples)
        except ConfigError:
            raise
        except Exception as error:
            if not self._is_trial:
                raise
            if isinstance(error, _MISTAKES) or not self._are_few:
                why = f"it raises {described(error)} for {_shapes(samples)}"
                remedy = "correct it, or return NaN where it is not defined"
                raise ConfigError(f"metrics.{name}", ABSENT, why, remedy) from error
            self.needs_more = True
            log.debug("metrics.%s cannot be computed of a few samples", name, exc_info=True)
            return float("nan")
        try:
            dtype = None if isinstance(value, torch.Tensor) else torch.float64  # a number keeps its digits
            if isinstance(value, tuple) or "complex" in str(getattr(value, "dtype", "")):
                raise TypeError  # such as (statistic, p) of SciPy
            return float(torch.as_tensor(value, dtype=dtype).cpu().double().mean())
        except (TypeError, ValueError, RuntimeError):
            why = f"it returns {value}, and not a number{functions.place(metric)}"
            remedy = "return one number, or an array whose mean is meant"
            raise ConfigError(f"metrics.{name}", ABSENT, why, remedy) from None

    def _called(self, name: str, metric: Metric, samples: tuple[Any, Any] | None) -> Any:
        """Return what a copy of `metric` returns: what it remembers would be neither saved nor that of other modes."""
        try:
            own = copy.deepcopy(metric)
        except Exception:  # of any type: it holds a file, for example
            own = metric
        before = _remembered(own)
        value = own(*copied(samples or ()))
        changed = [key for key, mark in _remembered(own).items() if own is not metric and before.get(key) != mark]
        if changed and not self._is_trial and (name, "state") not in self._warned:
            self._warned.add((name, "state"))
            text = "metrics.%s remembers %s, which begins anew in each evaluation: a metric is one of its samples"
            log.warning(text, name, changed[0])
        return value

    def update(self, name: str, metric: Any, outputs: Tree, targets: Tree) -> None:
        """Count samples in an object of torchmetrics."""
        try:
            with torch.autocast(tensors_of(targets)[0].device.type, enabled=False):
                metric.update(*copied((outputs, targets)))
        except Exception as error:
            if not self._is_trial:
                raise
            why = f"it does not take {_shapes((outputs, targets))}: {described(error)}"
            remedy = "choose the object for this task and this number of classes, or pass a function of both"
            raise ConfigError(f"metrics.{name}", ABSENT, why, remedy) from error

    def keep(self, outputs: Tree, targets: Tree) -> Kept:
        """Return samples for `joined`, without the types of their outputs, which other ranks could not decode."""
        self._like = {"outputs": outputs, "targets": targets}
        plain = (torch.Tensor, bool, int, float)
        return num_rows(targets), [each if isinstance(each, plain) else None for _, each in leaves_of(self._like)]

    def joined(self, batches: list[Kept], device: torch.device) -> tuple[Tree, Tree] | None:
        """Return the outputs and the targets of all samples that are kept, in the structure of those of a batch."""
        if not batches:
            return None
        lengths = [count for count, _ in batches]
        like = [*leaves_of(self._like)]
        if any(len(leaves) != len(like) for _, leaves in batches):
            why = "batches have outputs of different structures, which cannot be joined for the metrics"
            raise ConfigError("model", ABSENT, why, "return the same structure for any number of samples")
        columns = (
            self._column(name, [leaves[number] for _, leaves in batches], lengths, device)
            for number, (name, _) in enumerate(like)
        )
        # What is neither a tensor nor a number is that of a batch.
        joined = map_leaves(lambda leaf: leaf if (column := next(columns)) is None else column, self._like)
        return joined["outputs"], joined["targets"]

    def _column(self, name: str, parts: list[Any], lengths: list[int], device: torch.device) -> Any:
        """Return one tensor or number of all samples, given those of batches of these `lengths`."""
        tensors = [torch.as_tensor(each).to(device) for each in parts if each is not None]
        if len(tensors) < len(parts):
            return None
        if _are_rows(tensors, lengths):
            return torch.cat(tensors)
        if all(torch.equal(each, tensors[0]) for each in tensors):
            return tensors[0] if isinstance(parts[0], torch.Tensor) else parts[0]
        if name == "outputs" or name.partition(".")[0] == "targets":
            why = f"batches of {lengths[0]} and {lengths[-1]} samples have {name} of the shapes "
            why += f"{list(tensors[0].shape)} and {list(tensors[-1].shape)}, which cannot be joined for the metrics"
            remedy = "return a row for each sample, all of one shape; or let the loss return a dict, with (sum, count) "
            remedy += "of what is to be measured"
            raise ConfigError("model" if name == "outputs" else "data", ABSENT, why, remedy)
        if (name, "") not in self._warned and not self._is_trial:
            self._warned.add((name, ""))
            log.warning("metrics: %s has no rows of samples, and differs from batch to batch: NaN", name)
        return torch.tensor(torch.nan, device=device)


class Tally:
    """What one process has seen of the samples of an evaluation.

    An object of torchmetrics takes outputs for logits if any of a call is outside [0, 1]. So that this does not depend
    on the batches, outputs that are all inside are kept until some follow that are not, and are counted with these.
    """

    def __init__(self, owner: EvaluationMetrics, device: torch.device):
        self._owner, self._device, self._merged = owner, device, owner.merged(device)
        self._samples: list[Kept] = []
        self._has_logits = False

    def update(self, outputs: Tree, targets: Tree) -> None:
        """Count samples: their outputs and targets, [n, …] each, as the metrics take them."""
        if not self._owner.names:
            return
        if self._merged and isinstance(outputs, torch.Tensor):
            is_real = outputs.is_floating_point()
            is_logits = is_real and not bool(((outputs >= 0) & (outputs <= 1)).all())
            if not is_real or (is_logits and self._has_logits):
                self._count()
            self._has_logits |= is_logits
        self._samples.append(self._owner.keep(outputs, targets))

    def _count(self) -> None:
        samples, self._samples = self._owner.joined(self._samples, self._device), []
        for name, metric in self._merged.items():
            if samples is not None:
                self._owner.update(name, metric, *samples)

    def sums(self) -> MetricSums:
        """Return what `EvaluationMetrics.compute` needs of this process, as an item of the metric sums."""
        states = {name: metric.metric_state for name, metric in self._merged.items()}
        return {_KEY: [{"states": states, "samples": self._samples}]} if self._owner.names else {}


def _are_rows(tensors: list[torch.Tensor], lengths: list[int]) -> bool:
    """Return whether tensors of batches of these `lengths` have one or several rows for each sample, of one shape."""
    if any(each.dim() == 0 or each.shape[1:] != tensors[0].shape[1:] for each in tensors):
        return False
    ratio = len(tensors[0]) // lengths[0]
    return all(len(each) == ratio * length > 0 for each, length in zip(tensors, lengths, strict=True))


def _remembered(metric: Metric) -> dict[str, Any]:
    """Return the plain attributes of an object that is called, or whose method is, and the lengths of others."""
    attributes = getattr(getattr(metric, "__self__", metric), "__dict__", {})
    sized = (list, dict, set, tuple)
    return {
        key: len(value) if isinstance(value, sized) else value
        for key, value in attributes.items()
        if isinstance(value, (bool, int, float, str, type(None), *sized))
    }


def _shapes(samples: tuple[Any, Any] | None) -> str:
    """Return the types and shapes of outputs and targets in words."""
    tensor = "{} of {}".format
    found = [
        tensor(str(each.dtype).removeprefix("torch."), list(each.shape))
        if isinstance(each, torch.Tensor)
        else type(each).__name__
        for each in samples or ()
    ]
    return " and ".join(f"{name} {each}" for name, each in zip(("outputs", "targets"), found, strict=False))


_MERGED = {"dim_zero_sum", "dim_zero_cat", "dim_zero_max", "dim_zero_min"}
"""The reductions of states for which merging is the same as counting all samples in one object."""


def _merges(metric: Any) -> bool:
    """Return whether counting batches is the same as counting all samples at once, but for the guess of logits.

    It is not if the class is a user's own, which may average over a batch, or if something else is found in each call.
    """
    reductions = getattr(metric, "_reductions", {})
    plain = {getattr(each, "__name__", "") for each in reductions.values()} <= _MERGED
    finds = getattr(metric, "data_range", 0) is None or getattr(metric, "ignore_index", None) is not None
    is_known = type(metric).__module__.startswith("torchmetrics.") and not finds
    return bool(reductions) and plain and is_known and metric.full_state_update is False


def _fresh(metric: Any, device: torch.device) -> Any:
    fresh = metric.clone().to(device).set_dtype(sum_dtype(device))
    for each in fresh.modules():
        each.distributed_available_fn = bool  # False: it must not wait for other ranks, to add up what each has whole
    fresh.reset()
    return fresh
