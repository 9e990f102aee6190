"""Evaluation metrics besides those of a workload: of torchmetrics, or functions of all held-out samples."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch

from runner.config.errors import ABSENT, ConfigError, check, described, did_you_mean
from runner.data.base import copied
from runner.device import sum_dtype
from runner.system.import_path import is_installed
from runner.tracking.metrics import MetricSums

Metric: TypeAlias = Callable[..., Any]
"""A `torchmetrics.Metric`, or a function of (outputs, targets) of all samples, whose value is averaged if need be."""

log = logging.getLogger(__name__)

_KEY = "evaluation_metrics"  # in the metric sums


class EvaluationMetrics:
    """The metrics of an evaluation by name, computed from the shards of all processes.

    A workload calls `start` and `Tally.update` in `evaluate`, and adds `Tally.sums` to its metric sums, which the mode
    combines; `summarize` calls `compute`. The states of torchmetrics objects are merged, if they allow it; for other
    objects and for functions, the outputs and the targets of all samples are kept. No sample counts twice.

    Args:
        metrics: the metrics by name. They are copied, not changed.
        goals: `min` or `max` of each metric by which a run may end early.
    """

    def __init__(self, metrics: Mapping[str, Metric], goals: Mapping[str, str] = {}):
        self._metrics, self._warned, self.goals = dict(metrics), set[tuple[str, str]](), dict(goals)

    def start(self, device: torch.device) -> Tally:
        """Return a tally without samples, whose states are on `device`."""
        return Tally(self._metrics, device)

    def compute(self, sums: MetricSums, device: torch.device) -> dict[str, float]:
        """Return the value of each metric, computed on `device`, given the metric sums over all ranks.

        Raises:
            ConfigError: if the value of a metric is neither a number nor an array of numbers.
        """
        parts, values = sums.get(_KEY, []), {}
        samples = _samples(parts, device)
        for name, metric in self._metrics.items():
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                values[name] = _value(name, metric, parts, samples, device)
            for text in (str(each.message) for each in said):  # such as of a class without samples
                if not text.startswith("The ``compute`` method") and (name, text) not in self._warned:
                    log.warning("eval/%s: %s", name, text)
                    self._warned.add((name, text))
        return values

    def try_on(self, outputs: Any, targets: torch.Tensor) -> None:
        """Compute the metrics of a batch, so that mistakes in their code show before the first step.

        Other errors are not raised: a batch may lack what a metric needs, such as samples of all classes.

        Raises:
            ConfigError: if a metric uses a name, an attribute or an argument that does not exist, or is no number.
        """
        for name, metric in self._metrics.items():
            tally = Tally({name: metric}, targets.device)
            try:
                with warnings.catch_warnings(action="ignore"):
                    tally.update(outputs, targets)
                    parts = tally.sums()[_KEY]
                    _value(name, metric, parts, _samples(parts, targets.device), targets.device)
            except (NameError, AttributeError, TypeError) as error:
                why = f"it raises {described(error)}"
                raise ConfigError(f"metrics.{name}", ABSENT, why, "correct it") from error
            except ConfigError:
                raise
            except Exception:
                log.debug("metrics.%s cannot be computed of the first batch", name, exc_info=True)


class Tally:
    """What one process has seen of the samples of an evaluation."""

    def __init__(self, metrics: Mapping[str, Metric], device: torch.device):
        self._merged = {name: _fresh(metric, device) for name, metric in metrics.items() if _merges(metric)}
        self._keeps_samples = len(self._merged) < len(metrics)
        self._samples: list[tuple[torch.Tensor, torch.Tensor]] = []

    def update(self, outputs: Any, targets: torch.Tensor) -> None:
        """Count samples: their outputs and targets, [n, …] each, as the metrics take them."""
        for metric in self._merged.values():
            with torch.autocast(targets.device.type, enabled=False):
                metric.update(*copied((outputs, targets)))
        if self._keeps_samples:
            self._samples.append((outputs, targets))

    def sums(self) -> MetricSums:
        """Return what `EvaluationMetrics.compute` needs of this process, as an item of the metric sums."""
        states = {name: metric.metric_state for name, metric in self._merged.items()}
        return {_KEY: [{"states": states, "samples": self._samples}]} if states or self._keeps_samples else {}


def _samples(parts: list[dict[str, Any]], device: torch.device) -> tuple[Any, Any] | None:
    """Return the outputs and the targets of all samples, if they were kept."""
    kept = [batch for part in parts for batch in part["samples"]]
    return (_joined([outputs for outputs, _ in kept], device), _joined([y for _, y in kept], device)) if kept else None


def _joined(parts: list[Any], device: torch.device) -> Any:
    """Return the outputs of all samples, given those of batches: tensors, or dicts, lists and tuples of them."""
    if isinstance(parts[0], torch.Tensor):
        return torch.cat([each.to(device) for each in parts])
    if isinstance(parts[0], Mapping):
        return {key: _joined([each[key] for each in parts], device) for key in parts[0]}
    return tuple(_joined(list(each), device) for each in zip(*parts, strict=True))


def _value(
    name: str, metric: Metric, parts: list[dict[str, Any]], samples: tuple[Any, Any] | None, device: torch.device
) -> float:
    from torch.utils._pytree import tree_map  # here, as it would load torch

    with torch.inference_mode():
        if _merges(metric):
            whole = _fresh(metric, device)
            for part in reversed(parts):  # `merge_state` puts the samples of the argument first
                whole.merge_state(tree_map(lambda state: state.to(device), part["states"][name]))
            value = whole.compute()
        else:
            assert samples is not None
            value = (_fresh(metric, device) if hasattr(metric, "merge_state") else metric)(*copied(samples))
    try:
        return float(torch.as_tensor(value).cpu().double().mean())
    except (TypeError, ValueError, RuntimeError):
        why, remedy = f"it returns {value}, and not a number", "return one number, or an array whose mean is meant"
        raise ConfigError(f"metrics.{name}", ABSENT, why, remedy) from None


_MERGED = {"dim_zero_sum", "dim_zero_cat", "dim_zero_max", "dim_zero_min"}
"""The reductions of states for which merging is the same as counting all samples in one object."""


def _merges(metric: Any) -> bool:
    reductions = getattr(metric, "_reductions", {})
    plain = {getattr(each, "__name__", "") for each in reductions.values()} <= _MERGED
    return bool(reductions) and plain and metric.full_state_update is False


def _fresh(metric: Any, device: torch.device) -> Any:
    fresh = metric.clone().to(device).set_dtype(sum_dtype(device))
    for each in fresh.modules():
        each.distributed_available_fn = bool  # False: it must not wait for other ranks, to add up what each has whole
    fresh.reset()
    return fresh


# ---------------------------------------------------------------------------------------------------------------------
# Metrics that the option `workload.metrics` names


class Named(NamedTuple):
    """A class of torchmetrics, whether its `min` or `max` is best, and its arguments."""

    cls: str
    goal: str = "max"
    arguments: Mapping[str, Any] = {}


_OF_EACH_CLASS = {
    "f1": "MulticlassF1Score",
    "precision": "MulticlassPrecision",
    "recall": "MulticlassRecall",
    "specificity": "MulticlassSpecificity",
    "jaccard": "MulticlassJaccardIndex",
    "auroc": "MulticlassAUROC",
    "average_precision": "MulticlassAveragePrecision",
}

OF_CLASSES: Mapping[str, Named] = {
    **{name: Named(cls, arguments={"average": "macro"}) for name, cls in _OF_EACH_CLASS.items()},
    **{f"{name}_weighted": Named(cls, arguments={"average": "weighted"}) for name, cls in _OF_EACH_CLASS.items()},
    "balanced_accuracy": Named("MulticlassAccuracy", arguments={"average": "macro"}),
    "cohen_kappa": Named("MulticlassCohenKappa"),
    "mcc": Named("MulticlassMatthewsCorrCoef"),
    "calibration_error": Named("MulticlassCalibrationError", "min"),
}
"""Metrics of probabilities [n, num_classes] and class indices [n]; `f1` is the mean over classes of their F1."""

OF_NUMBERS: Mapping[str, Named] = {
    "mse": Named("MeanSquaredError", "min", {"num_outputs": 0}),
    "rmse": Named("MeanSquaredError", "min", {"num_outputs": 0, "squared": False}),
    "mape": Named("MeanAbsolutePercentageError", "min"),
    "smape": Named("SymmetricMeanAbsolutePercentageError", "min"),
    "pearson": Named("PearsonCorrCoef", "max", {"num_outputs": 0}),
    "spearman": Named("SpearmanCorrCoef", "max", {"num_outputs": 0}),
    "concordance": Named("ConcordanceCorrCoef", "max", {"num_outputs": 0}),
    "explained_variance": Named("ExplainedVariance"),
}
"""Metrics of predicted and true numbers, [n], or [n, num_targets] for several targets, over which they are averaged."""


def named_metrics(table: Mapping[str, Named], names: Iterable[str], size: int) -> EvaluationMetrics:
    """Return the metrics of torchmetrics with these `names` in `table`; `size` is the number of classes or targets.

    One that is not defined is NaN, such as a correlation if all outputs are equal.
    """
    chosen = {name: table[name] for name in names}
    metrics = {name: _object(named, size) for name, named in chosen.items()}
    return EvaluationMetrics(metrics, {name: named.goal for name, named in chosen.items()})


def _object(named: Named, size: int) -> Metric:
    import torchmetrics.classification
    import torchmetrics.regression

    if named.cls.startswith("Multiclass"):
        cls = getattr(torchmetrics.classification, named.cls)
        return cls(num_classes=size, validate_args=False, **named.arguments)  # the checks would wait for the device
    sized = {"num_outputs": size} if "num_outputs" in named.arguments else {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* will save all targets and predictions")
        return getattr(torchmetrics.regression, named.cls)(**{**named.arguments, **sized})


def check_names(key: str, names: Iterable[str], table: Mapping[str, Named], task: str) -> None:
    """Refuse `names` that are not in `table`, the metrics of `task`, or any if torchmetrics is not installed."""
    for name in names:
        check(name in table, key, list(names), f"{name} is not a metric of {task};", did_you_mean(name, table))
        check(is_installed("torchmetrics"), key, name, "torchmetrics is not installed", "pip install torchmetrics")
