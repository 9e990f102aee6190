"""The evaluation metrics that the option `workload.metrics` names, of all held-out samples at once.

They are those of scikit-learn, where it has them. One that is not defined, such as a correlation with a constant, is
NaN.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch

from runner.config.errors import check, did_you_mean
from runner.device import sum_dtype

Function: TypeAlias = "Callable[[torch.Tensor, torch.Tensor], torch.Tensor]"
"""A function of outputs and targets, which returns a scalar."""


class Named(NamedTuple):
    """A metric, and whether its `min` or `max` is best."""

    function: Function
    goal: str = "max"


def check_names(key: str, names: Iterable[str], table: Mapping[str, Named], task: str) -> None:
    """Refuse `names` that are not in `table`, the metrics of `task`."""
    for name in names:
        check(name in table, key, list(names), f"{name} is not a metric of {task};", did_you_mean(name, table))


# ---------------------------------------------------------------------------------------------------------------------
# Metrics of the counts of each class: float64 [num_classes] each, of right predictions, predictions and samples.


def class_counts(predicted: torch.Tensor, targets: torch.Tensor, num_classes: int) -> torch.Tensor:
    """Return the numbers of right predictions, of predictions and of samples of each class, int64 [3, num_classes]."""
    count = partial(torch.bincount, minlength=num_classes)
    return torch.stack((count(targets[predicted == targets]), count(predicted), count(targets)))


def _ratio(part: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    return part / whole.clamp(min=1)  # 0 where there is nothing


def _specificity(right: torch.Tensor, predicted: torch.Tensor, samples: torch.Tensor) -> torch.Tensor:
    others = samples.sum() - samples
    return torch.where(others > 0, (others - predicted + right) / others, math.nan)


_OF_EACH_CLASS: Mapping[str, Callable[..., Any]] = {
    "f1": lambda right, predicted, samples: _ratio(2 * right, predicted + samples),
    "precision": lambda right, predicted, samples: _ratio(right, predicted),
    "recall": lambda right, predicted, samples: _ratio(right, samples),
    "specificity": _specificity,
    "jaccard": lambda right, predicted, samples: _ratio(right, predicted + samples - right),
}


def _mean(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the weighted mean of the values that are defined, and that count."""
    counted = ~values.isnan() & (weights > 0)
    return (values * weights)[counted].sum() / weights[counted].sum()  # 0 / 0 is NaN


def _macro(name: str, *counts: torch.Tensor) -> torch.Tensor:
    return _mean(_OF_EACH_CLASS[name](*counts), (counts[1] + counts[2] > 0).double())


def _weighted(name: str, *counts: torch.Tensor) -> torch.Tensor:
    return _mean(_OF_EACH_CLASS[name](*counts), counts[2])


def _balanced_accuracy(right: torch.Tensor, predicted: torch.Tensor, samples: torch.Tensor) -> torch.Tensor:
    return _mean(_ratio(right, samples), (samples > 0).double())


def _cohen_kappa(right: torch.Tensor, predicted: torch.Tensor, samples: torch.Tensor) -> torch.Tensor:
    total = samples.sum()
    by_chance = (predicted * samples).sum() / total.square()
    return (right.sum() / total - by_chance) / (1 - by_chance)


def _mcc(right: torch.Tensor, predicted: torch.Tensor, samples: torch.Tensor) -> torch.Tensor:
    total = samples.sum()
    covariance = right.sum() * total - (predicted * samples).sum()
    spreads = total.square() - torch.stack((predicted, samples)).square().sum(1)
    return torch.where(spreads.min() > 0, covariance / spreads.sqrt().prod(), 0)  # 0, as in scikit-learn


OF_COUNTS: Mapping[str, Callable[..., Any]] = {
    **{name: partial(_macro, name) for name in _OF_EACH_CLASS},
    **{f"{name}_weighted": partial(_weighted, name) for name in _OF_EACH_CLASS},
    "balanced_accuracy": _balanced_accuracy,
    "cohen_kappa": _cohen_kappa,
    "mcc": _mcc,
}
"""Functions of the counts of right predictions, of predictions and of samples of each class."""

# ---------------------------------------------------------------------------------------------------------------------
# Metrics of the logits, [n, num_classes], and the class indices, [n], of all samples


def _of_counts(name: str, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return OF_COUNTS[name](*class_counts(logits.argmax(1), targets, logits.shape[1]).cpu().double())


def _log_odds(logits: torch.Tensor) -> torch.Tensor:
    """Return log(p / (1 − p)) of the probability p of each class: its order, without the rounding of p to 1."""
    logits = logits.to(sum_dtype(logits.device))
    logits = logits - logits.amax(1, keepdim=True)
    first = logits.argmax(1, keepdim=True)
    whole = logits.logsumexp(1, keepdim=True)
    others = whole + torch.log1p(-torch.exp(logits - whole))
    without_first = logits.scatter(1, first, -math.inf).logsumexp(1, keepdim=True)
    mantissas, exponents = torch.frexp(logits - others.scatter(1, first, without_first))
    return torch.ldexp((mantissas * 2**40).round(), exponents)  # equal ones stay equal, whatever their last bits


def _thresholds(scores: torch.Tensor, positive: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the numbers of positive and of negative samples with each score, from the highest score on."""
    values, places = scores.unique(return_inverse=True)
    counts = (torch.bincount(places[which], minlength=len(values)) for which in (positive, ~positive))
    positives, negatives = (count.flip(0).to(scores.dtype) for count in counts)
    return positives, negatives


def _area_under_roc(scores: torch.Tensor, positive: torch.Tensor) -> torch.Tensor:
    positives, negatives = _thresholds(scores, positive)
    lower = negatives.sum() - negatives.cumsum(0) + negatives / 2  # those with the same score count as halves
    return (positives * lower).sum() / (positives.sum() * negatives.sum())


def _average_precision(scores: torch.Tensor, positive: torch.Tensor) -> torch.Tensor:
    positives, negatives = _thresholds(scores, positive)
    precision = positives.cumsum(0) / (positives + negatives).cumsum(0)
    return (positives * precision).sum() / positives.sum()


def _one_against_all(
    function: Function, is_weighted: bool, logits: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    scores = _log_odds(logits)
    if bool(scores.isnan().any()):
        return scores.new_tensor(math.nan)
    samples = torch.bincount(targets, minlength=scores.shape[1]).to(scores.dtype)
    if absent := int((samples == 0).sum()):
        warnings.warn(f"{absent} of {len(samples)} classes have no samples, and are left out of the mean", stacklevel=1)
    values = [function(scores[:, each], targets == each) for each in range(len(samples))]
    return _mean(torch.stack(values), samples if is_weighted else (samples > 0).to(scores.dtype))


def _calibration_error(logits: torch.Tensor, targets: torch.Tensor, num_bins: int = 15) -> torch.Tensor:
    """Return the expected calibration error (Guo et al., 2017), of bins of the probability of the prediction."""
    confidence, predicted = logits.to(sum_dtype(logits.device)).softmax(1).max(1)
    if bool(confidence.isnan().any()):
        return confidence.new_tensor(math.nan)
    places = ((confidence * num_bins).ceil().long() - 1).clamp(0, num_bins - 1)
    gaps = confidence.new_zeros(num_bins).index_add_(0, places, confidence - (predicted == targets).to(confidence))
    return gaps.abs().sum() / len(targets)


OF_CLASSES: Mapping[str, Named] = {
    **{name: Named(partial(_of_counts, name)) for name in OF_COUNTS},
    "auroc": Named(partial(_one_against_all, _area_under_roc, False)),
    "auroc_weighted": Named(partial(_one_against_all, _area_under_roc, True)),
    "average_precision": Named(partial(_one_against_all, _average_precision, False)),
    "average_precision_weighted": Named(partial(_one_against_all, _average_precision, True)),
    "calibration_error": Named(_calibration_error, "min"),
}
"""Metrics of logits [n, num_classes] and class indices [n]; `f1` is the mean over classes of their F1."""

# ---------------------------------------------------------------------------------------------------------------------
# Metrics of the predicted and the true numbers of all samples, [n, num_targets], averaged over targets


def _mape(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return ((outputs - targets).abs() / targets.abs().clamp(min=torch.finfo(torch.float64).eps)).mean()


def _smape(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    sizes = outputs.abs() + targets.abs()
    return (2 * (outputs - targets).abs() / torch.where(sizes == 0, 1, sizes)).mean()


def _deviations(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the deviations from the means, which are NaN where all values are equal."""
    both = (outputs, targets)
    return tuple(torch.where(each.amax(0) > each.amin(0), each - each.mean(0), math.nan) for each in both)


def _pearson(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    x, y = (each / each.abs().amax(0) for each in _deviations(outputs, targets))  # no square over- or underflows
    return ((x * y).sum(0) / (x.square().sum(0) * y.square().sum(0)).sqrt()).mean()


def _ranks(values: torch.Tensor) -> torch.Tensor:
    """Return the rank of each of the values, [n]; that of equal ones is their mean."""
    if bool(values.isnan().any()):
        return values * math.nan
    _, places, counts = values.unique(return_inverse=True, return_counts=True)
    return (counts.cumsum(0) - (counts - 1) / 2)[places].to(values.dtype)


def _spearman(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    ranks = (torch.stack([_ranks(each) for each in values.unbind(1)], 1) for values in (outputs, targets))
    return _pearson(*ranks)


def _concordance(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    x, y = _deviations(outputs, targets)
    distances = (len(targets) - 1) * (outputs.mean(0) - targets.mean(0)).square()
    return (2 * (x * y).sum(0) / (x.square().sum(0) + y.square().sum(0) + distances)).mean()


def _explained_variance(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    both = (outputs - targets, targets)
    left, whole = (torch.where(each.amax(0) == each.amin(0), 0, each - each.mean(0)).square().sum(0) for each in both)
    # Of equal targets, it is 1 if all errors are equal, and else 0, as in scikit-learn.
    return (1 - torch.where(whole == 0, torch.where(left > 0, 1, left), left / whole)).mean()


OF_NUMBERS: Mapping[str, Named] = {
    "mse": Named(lambda outputs, targets: (outputs - targets).square().mean(), "min"),
    "rmse": Named(lambda outputs, targets: (outputs - targets).square().mean(0).sqrt().mean(), "min"),
    "mape": Named(_mape, "min"),
    "smape": Named(_smape, "min"),
    "pearson": Named(_pearson),
    "spearman": Named(_spearman),
    "concordance": Named(_concordance),
    "explained_variance": Named(_explained_variance),
}
"""Metrics of predicted and true numbers, [n, num_targets], which are averaged over the targets."""

# ---------------------------------------------------------------------------------------------------------------------
# The same of the outputs of a user's network, whose targets are classes, [n, …], or numbers of the outputs' shape


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return whether each prediction is right, for outputs [n, num_classes, …]; targets of -100 do not count."""
    return (outputs.argmax(1) == targets)[targets != -100]


OF_CLASSES_OR_NUMBERS: Mapping[str, Named] = {"accuracy": Named(accuracy), **OF_CLASSES, **OF_NUMBERS}


def of_samples(name: str, of_classes: bool) -> Function:
    """Return a metric as a function of the outputs and targets of a user's network.

    Raises:
        ConfigError: if it is not one of classes, or of numbers; by the function, if the outputs do not fit.
    """
    table, kinds = (OF_CLASSES, ("numbers", "classes")) if of_classes else (OF_NUMBERS, ("classes", "numbers"))
    if name == "accuracy" and of_classes:
        return accuracy
    why = f"{name} is a metric of {kinds[0]}, and the targets are {kinds[1]}"
    remedy = f"choose from: {', '.join(table)}; or define metrics in the file"
    check(name in table, "workload.metrics", name, why, remedy)
    return partial(_of_outputs, name, of_classes)


def _of_outputs(name: str, of_classes: bool, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    shape = list(outputs.shape) if isinstance(outputs, torch.Tensor) else []
    wanted = [len(targets), *shape[1:2], *targets.shape[1:]] if of_classes else list(targets.shape)
    why = f"outputs are {shape or type(outputs).__name__}, and targets {list(targets.shape)}"
    remedy = f"define metrics in the file: metrics = {{'{name}': function of (outputs, targets)}}"
    check(len(shape) > of_classes and shape == wanted, "workload.metrics", name, why, remedy)
    if not of_classes:
        numbers = (each.view(len(each), -1).to(sum_dtype(each.device)) for each in (outputs, targets))
        return OF_NUMBERS[name].function(*numbers)
    counts = targets.flatten() != -100
    logits, classes = outputs.movedim(1, -1).flatten(0, -2)[counts], targets.flatten()[counts].long()
    if name not in OF_COUNTS and bool((logits >= 0).all()):
        why = "the outputs are probabilities, and it takes logits"
        is_sum = torch.isclose(logits.sum(1), logits.new_ones(()), atol=1e-4)
        check(not bool(is_sum.all()), "workload.metrics", name, why, f"return logits; or {remedy}")
    return OF_CLASSES[name].function(logits, classes)
