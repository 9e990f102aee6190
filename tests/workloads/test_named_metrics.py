"""The metrics that `workload.metrics` names, against scikit-learn and SciPy, of random and of degenerate samples."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import scipy.stats
import sklearn.metrics
import torch

from runner.workloads.evaluation_metrics import EvaluationMetrics
from runner.workloads.named_metrics import OF_CLASSES, OF_COUNTS, OF_NUMBERS, class_counts

CPU = torch.device("cpu")
OF_LABELS: dict[str, Callable[..., Any]] = {
    **{
        name + suffix: partial(getattr(sklearn.metrics, function), average=average, zero_division=0)
        for name, function in (
            ("f1", "f1_score"),
            ("precision", "precision_score"),
            ("recall", "recall_score"),
            ("jaccard", "jaccard_score"),
        )
        for suffix, average in (("", "macro"), ("_weighted", "weighted"))
    },
    "balanced_accuracy": sklearn.metrics.balanced_accuracy_score,
    "cohen_kappa": sklearn.metrics.cohen_kappa_score,
    "mcc": sklearn.metrics.matthews_corrcoef,
}


def value(name: str, outputs: torch.Tensor, targets: torch.Tensor) -> float:
    """Return the metric of samples that three processes have, the second of which has none."""
    named = OF_CLASSES.get(name) or OF_NUMBERS[name]
    metrics, parts = EvaluationMetrics({name: named.function}), []
    for rows in ([0], [], range(1, len(targets))):
        tally = metrics.start(CPU)
        for row in rows:
            tally.update(outputs[row : row + 1], targets[row : row + 1])
        parts += tally.sums()["evaluation_metrics"]
    with warnings.catch_warnings(action="ignore"):
        return metrics.compute({"evaluation_metrics": parts}, CPU)[name]


def of_labels(name: str, predicted: np.ndarray, true: np.ndarray) -> float:
    with warnings.catch_warnings(action="ignore"):
        return float(OF_LABELS[name](true, predicted))


CLASSES = {
    "random": ([0, 1, 2, 3, 1, 0, 2, 2, 1, 3], [0, 1, 2, 3, 0, 0, 1, 2, 3, 3]),
    "a class without samples is predicted": ([0, 1, 2, 3, 2], [0, 1, 2, 2, 2]),
    "a class is neither sampled nor predicted": ([0, 1, 1, 0], [0, 1, 0, 0]),
    "one class": ([1, 1, 1], [1, 1, 1]),
    "one class, mistaken": ([0, 1, 2], [1, 1, 1]),
    "one class predicted": ([1, 1, 1], [0, 1, 2]),
    "one sample": ([0], [2]),
    "nothing right": ([1, 2, 3, 0], [0, 1, 2, 3]),
}


@pytest.mark.parametrize("num_classes", [4, 7])
@pytest.mark.parametrize("case", CLASSES)
def test_metrics_of_predicted_classes_are_those_of_scikit_learn(case, num_classes):
    predicted, true = map(np.array, CLASSES[case])
    logits, targets = 3 * torch.eye(num_classes)[predicted] - 1, torch.tensor(true)
    counts = class_counts(torch.tensor(predicted), targets, num_classes).double()
    for name in OF_LABELS:
        wanted = pytest.approx(of_labels(name, predicted, true), abs=1e-12, nan_ok=True)
        assert value(name, logits, targets) == wanted, name
        assert float(OF_COUNTS[name](*counts)) == wanted, name
    seen, of_each = sorted({*predicted, *true}), {}
    for each in seen:
        others = true != each
        if others.any():
            of_each[each] = (predicted[others] != each).mean()
    weights = {each: (true == each).sum() for each in of_each}
    mean = np.mean([*of_each.values()]) if of_each else math.nan
    assert value("specificity", logits, targets) == pytest.approx(mean, nan_ok=True)
    total = sum(weights.values())
    mean = sum(of_each[each] * weights[each] for each in of_each) / total if total else math.nan
    assert value("specificity_weighted", logits, targets) == pytest.approx(mean, nan_ok=True)
    tested = {*OF_LABELS, "specificity", "specificity_weighted"}
    assert tested | {name for name in OF_CLASSES if name.startswith(("auroc", "average_p", "calib"))} == {*OF_CLASSES}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("num_classes", [2, 5])
def test_areas_are_those_of_scikit_learn(num_classes, dtype):
    generator = torch.Generator().manual_seed(num_classes)
    for tied in (False, True):
        logits = torch.randn(60, num_classes, generator=generator).to(dtype)
        logits = logits.round() if tied else logits
        targets = torch.randint(num_classes, (60,), generator=generator)
        scores, hot = logits.double().softmax(1).numpy(), np.eye(num_classes)[targets.numpy()]
        scores = scores.round(12)  # equal ones are those that differ in their last bits
        for suffix, average in (("", "macro"), ("_weighted", "weighted")):
            wanted = sklearn.metrics.roc_auc_score(hot, scores, average=average)
            assert value(f"auroc{suffix}", logits, targets) == pytest.approx(wanted, abs=1e-12)
            wanted = sklearn.metrics.average_precision_score(hot, scores, average=average)
            found = value(f"average_precision{suffix}", logits, targets)
            assert found == pytest.approx(wanted, abs=1e-12)


def test_areas_keep_the_order_of_scores_that_a_softmax_saturates():
    """Of float32 probabilities, all of these are 1, and also of float64 the highest ones."""
    logits = torch.tensor([[10.0, -20], [20, -20], [40, -20], [15, -20], [60, -20], [80, -20]])
    targets = torch.tensor([1, 1, 0, 1, 0, 1])
    wanted = sklearn.metrics.roc_auc_score(targets, (logits[:, 1] - logits[:, 0]).double())
    assert value("auroc", logits, targets) == pytest.approx(wanted, abs=1e-12)
    hot, difference = np.eye(2)[targets], (logits[:, :1] - logits[:, 1:]).double() * torch.tensor([1, -1])
    wanted = sklearn.metrics.average_precision_score(hot, difference, average="macro")
    assert value("average_precision", logits, targets) == pytest.approx(wanted, abs=1e-12)
    three = torch.cat((logits, logits[:, 1:] - 1), 1)  # the same order of the first class
    scores = [math.log(1) + float(a - torch.logsumexp(torch.stack((b, c)).double(), 0)) for a, b, c in three]
    wanted = sklearn.metrics.roc_auc_score(targets == 0, scores)
    found = value("auroc", three, targets)
    second = sklearn.metrics.roc_auc_score(targets == 1, [-score for score in scores])
    assert found == pytest.approx((wanted + second) / 2, abs=1e-12)


def test_areas_of_degenerate_scores():
    targets = torch.tensor([0, 1, 1, 0, 1])
    for constant in (torch.zeros(5, 2), torch.full((5, 2), 1e30), torch.tensor([[-7.25, 3]]).expand(5, 2)):
        assert value("auroc", constant, targets) == 0.5
        assert value("average_precision", constant, targets) == pytest.approx(0.5)
        assert value("average_precision_weighted", constant, targets) == pytest.approx((2 * 0.4 + 3 * 0.6) / 5)
    one_class = torch.zeros(3, dtype=torch.int64)
    assert math.isnan(value("auroc", torch.randn(3, 4), one_class))
    assert value("average_precision", torch.randn(3, 4), one_class) == 1
    assert math.isnan(value("auroc", torch.zeros(1, 2), torch.tensor([1])))
    unknown = torch.tensor([[0.0, math.nan], [1, 2], [3, 0]])
    for name in ("auroc", "average_precision_weighted", "calibration_error"):
        assert math.isnan(value(name, unknown, torch.tensor([0, 1, 0]))), name
    masked = torch.tensor([[1.0, -math.inf], [-math.inf, 0], [0, 1], [1, 0]])
    assert value("auroc", masked, torch.tensor([0, 1, 1, 0])) == 1


def test_the_calibration_error_is_the_mean_gap_of_bins():
    generator = torch.Generator().manual_seed(0)
    logits, targets = 3 * torch.randn(200, 4, generator=generator), torch.randint(4, (200,), generator=generator)
    logits[:20, 0] += 1000  # a probability of 1 is in the last bin
    probabilities = logits.double().softmax(1).numpy()
    confidence, right = probabilities.max(1), probabilities.argmax(1) == targets.numpy()
    error = 0.0
    for low in np.arange(15) / 15:
        inside = (confidence > low) & (confidence <= low + 1 / 15 + 1e-12)
        if inside.any():
            error += inside.mean() * abs(confidence[inside].mean() - right[inside].mean())
    assert value("calibration_error", logits, targets) == pytest.approx(error, abs=1e-9)


NUMBERS = {
    "random": ([1.0, 2.5, -3, 4, 0.5], [1.5, 2, -2, 3, 1]),
    "ties": ([1.0, 1, 2, 2, 3], [1.0, 2, 2, 3, 3]),
    "constant outputs": ([2.0, 2, 2], [1.0, 2, 4]),
    "constant targets": ([1.0, 2, 4], [0.1, 0.1, 0.1]),
    "both constant": ([1.0, 1], [1.0, 1]),
    "one sample": ([1.0], [2.0]),
    "unknown": ([1.0, math.nan, 3], [1.0, 2, 3]),
    "huge": ([1e200, 2e200, 4e200], [1e200, 3e200, 3.5e200]),
    "tiny": ([1e-200, 2e-200, 4e-200], [1e-200, 3e-200, 3.5e-200]),
    "a large offset": ([1e9 + 1, 1e9 + 2, 1e9 + 4], [1e9 + 1.5, 1e9 + 2, 1e9 + 3]),
    "small units": ([1e-9, 3e-9, 2e-9], [2e-9, 2e-9, 4e-9]),
    "zeros": ([1.0, 0, 2], [0.0, 0, 1]),
}


@pytest.mark.parametrize("case", NUMBERS)
def test_metrics_of_numbers_are_those_of_scikit_learn_and_scipy(case):
    one = [np.array(each) for each in NUMBERS[case]]
    outputs, targets = one
    is_known = not np.isnan(outputs).any()
    with warnings.catch_warnings(action="ignore"), np.errstate(all="ignore"):
        pairs = len(outputs) > 1 and is_known
        wanted = {
            "pearson": scipy.stats.pearsonr(outputs, targets)[0] if pairs else math.nan,
            "spearman": scipy.stats.spearmanr(outputs, targets)[0] if pairs else math.nan,
        }
        if is_known and case not in ("huge", "tiny"):
            wanted |= {
                "mse": sklearn.metrics.mean_squared_error(targets, outputs),
                "rmse": sklearn.metrics.root_mean_squared_error(targets, outputs),
                "mape": sklearn.metrics.mean_absolute_percentage_error(targets, outputs),
            }
            sizes = np.abs(outputs) + np.abs(targets)
            wanted["smape"] = np.where(sizes == 0, 0, 2 * np.abs(outputs - targets) / np.where(sizes, sizes, 1)).mean()
            vary = [np.ptp(each) > 0 for each in one]
            offset = 0 if vary[1] else targets[0]  # as the mean of equal numbers may have rounding errors
            wanted["explained_variance"] = sklearn.metrics.explained_variance_score(targets - offset, outputs - offset)
            (x, covariance), (_, y) = np.cov(outputs, targets)
            spread = x + y + (outputs.mean() - targets.mean()) ** 2
            wanted["concordance"] = 2 * covariance / spread if all(vary) else math.nan
            assert wanted.keys() == OF_NUMBERS.keys()
        if not is_known:
            wanted |= dict.fromkeys(OF_NUMBERS, math.nan)
    predicted, true = (torch.tensor(each)[:, None] for each in one)
    for name, number in wanted.items():
        found = value(name, predicted, true)
        assert found == pytest.approx(float(number), rel=1e-6, abs=1e-12, nan_ok=True), name
        twice = value(name, predicted.expand(-1, 2), true.expand(-1, 2))  # the mean over targets
        assert twice == pytest.approx(found, rel=1e-12, nan_ok=True), name
        if case == "random":
            mixed = torch.cat((predicted, torch.ones_like(predicted)), 1), torch.cat((true, torch.ones_like(true)), 1)
            assert math.isnan(value(name, *mixed)) == (name in ("pearson", "spearman", "concordance"))


# ---------------------------------------------------------------------------------------------------------------------
# Examples of public reports against other tools: what they computed was another value


def test_large_logits_keep_their_order():
    """A sigmoid or softmax in float32 makes ties of them, and the area 0.5."""
    logits = torch.tensor([98.0950, 98.4612, 98.1145, 98.1506, 97.6037, 98.9425, 99.2644, 99.5014, 99.7280])
    targets = torch.tensor([0, 1, 1, 1, 1, 1, 1, 1, 1])
    wanted = sklearn.metrics.roc_auc_score(targets, logits)
    assert wanted == 0.875
    found = value("auroc", torch.stack((torch.zeros(9), logits), 1), targets)
    assert found == pytest.approx(wanted)


@pytest.mark.parametrize("scale", [1e-4, 1e-12, 1e12])
def test_a_correlation_does_not_depend_on_the_unit(scale):
    generator = torch.Generator().manual_seed(42)
    outputs = torch.rand(200, 1, generator=generator).double()
    targets = outputs + 0.1 * torch.randn(200, 1, generator=generator)
    wanted = scipy.stats.pearsonr(outputs.flatten(), targets.flatten())[0]
    assert value("pearson", outputs * scale, targets * scale) == pytest.approx(wanted, rel=1e-9)


def test_a_constant_that_has_no_finite_binary_fraction_has_no_correlation():
    """The sum of 254 times 0.3, divided by 254, is not 0.3."""
    numbers, constant = torch.arange(254.0).double()[:, None], torch.full((254, 1), 0.3, dtype=torch.float64)
    for name in ("pearson", "spearman", "concordance"):
        assert math.isnan(value(name, numbers, constant)), name
        assert math.isnan(value(name, constant, numbers)), name
    assert value("explained_variance", numbers, constant) == 0
    assert math.isnan(value("explained_variance", torch.where(numbers == 3, math.nan, numbers), constant))


def test_ranks_of_equal_numbers_are_their_mean():
    outputs, targets = [1.0, 0, 4, 1, 0, 3, 0], [4.0, 0, 3, 3, 3, 1, 1]
    wanted = scipy.stats.spearmanr(outputs, targets)[0]
    assert wanted == pytest.approx(0.3529411764705882)
    columns = (torch.tensor(each, dtype=torch.float64)[:, None] for each in (outputs, targets))
    assert value("spearman", *columns) == pytest.approx(wanted, rel=1e-12)


def test_a_perfect_rank_correlation_is_exactly_1():
    numbers = torch.tensor([1.0, 2, 4, 3, 7])[:, None]
    assert value("spearman", numbers, numbers.exp()) == 1


def test_half_precision_outputs_that_are_close_have_a_correlation():
    outputs = torch.tensor([0.4746, 0.4805, 0.4766, 0.4805, 0.4766, 0.4805, 0.4785, 0.4824, 0.4805]).half().double()
    targets = torch.tensor([0.0336, 0.3676, 0.6302, 0.7192, 0.2295, 0.2886, 0.6302, 0.7096, 0.0208]).double()
    wanted = scipy.stats.pearsonr(outputs, targets)[0]
    assert value("pearson", outputs[:, None], targets[:, None]) == pytest.approx(wanted, rel=1e-9)
