"""Evaluation metrics of torchmetrics, and functions: every sample once in every mode, as if computed on all at once."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import sklearn.metrics
import torch
from helpers.compose import TINY_CPU, build_composed_run, compose_config, train_in
from helpers.events import scalar_curves
from helpers.extras import require
from helpers.plain_loop import weights_at
from helpers.ranks import PersistentRanks

from runner.config.errors import ConfigError
from runner.device import Device
from runner.parallel.ddp import DDP
from runner.workloads.classifier import Classifier
from runner.workloads.evaluation_metrics import EvaluationMetrics
from runner.workloads.named_metrics import OF_CLASSES, OF_NUMBERS

CPU = torch.device("cpu")
MODES = {
    "single": (1, ()),
    "ddp": (2, ("parallel=ddp",)),
    "pipeline": (2, ("parallel=pipeline",)),
    "ensemble": (2, ("parallel=ensemble",)),
}
COMMON = ("batch_size=12", "steps=20", "eval_every=10", "schedule=constant", "workload.eval_batch_size=100")
CLASSES = (*TINY_CPU, *COMMON, "optimizer.lr=0.2", f"workload.metrics=[{','.join(OF_CLASSES)},accuracy]")


def trained(
    path: Path, mode: str, ranks: Callable[[int], PersistentRanks], *overrides: str
) -> tuple[dict[str, float], torch.Tensor, torch.Tensor]:
    """Train a run, and return its metrics, and the outputs of the model and the targets for all held-out samples.

    Of an ensemble, they are those of the first member.
    """
    processes, words = MODES[mode]
    if processes == 1:
        metrics = train_in(path, build_composed_run(*overrides)).result.metrics
    else:
        metrics = ranks(processes).train(compose_config(*overrides, *words), path).metrics
    workload = build_composed_run(*overrides).workload
    workload.prepare()
    model = workload.build_model().eval()
    model.load_state_dict(weights_at(path, 20))
    [(inputs, targets)] = workload.held_out.in_order(10_000, (0, 1), CPU)
    prefix = "eval/member_0/" if mode == "ensemble" else "eval/"
    found = {tag.removeprefix(prefix): value for tag, value in metrics.items() if tag.startswith(prefix)}
    with torch.inference_mode():
        return found, model(inputs), targets


@pytest.mark.parametrize("mode", MODES)
def test_metrics_of_classes_are_those_of_all_held_out_samples_at_once(mode, ranks, tmp_path):
    """359 samples in batches of 100: the last batches and the shards of the processes are uneven."""
    of = require("torchmetrics.functional.classification")
    found, outputs, targets = trained(tmp_path, mode, ranks, *CLASSES)
    probabilities = outputs.softmax(1)
    wanted = {
        f"{name}{suffix}": getattr(of, f"multiclass_{function}")(probabilities, targets, 10, average=average)
        for name, function in {
            "f1": "f1_score",
            "jaccard": "jaccard_index",
            **{name: name for name in ("precision", "recall", "specificity", "auroc", "average_precision")},
        }.items()
        for suffix, average in (("", "macro"), ("_weighted", "weighted"))
    } | {
        "balanced_accuracy": of.multiclass_accuracy(probabilities, targets, 10, average="macro"),
        "cohen_kappa": of.multiclass_cohen_kappa(probabilities, targets, 10),
        "mcc": of.multiclass_matthews_corrcoef(probabilities, targets, 10),
        "calibration_error": of.multiclass_calibration_error(probabilities, targets, 10),
    }
    assert wanted.keys() == OF_CLASSES.keys()
    assert found.keys() == {*wanted, "loss", "accuracy"}
    for name, value in wanted.items():
        assert found[name] == pytest.approx(float(value), abs=1e-5), name
    predicted, true, scores = outputs.argmax(1), targets.numpy(), probabilities.double()
    assert found["f1"] == pytest.approx(sklearn.metrics.f1_score(true, predicted, average="macro"), abs=1e-5)
    assert found["mcc"] == pytest.approx(sklearn.metrics.matthews_corrcoef(true, predicted), abs=1e-5)
    scores /= scores.sum(1, keepdim=True)
    assert found["auroc"] == pytest.approx(sklearn.metrics.roc_auc_score(true, scores, multi_class="ovr"), abs=1e-5)


@pytest.mark.parametrize("num_targets", [1, 2])
@pytest.mark.parametrize("mode", ["single", "ddp"])
def test_metrics_of_numbers_are_in_the_units_of_the_data(mode, num_targets, ranks, tmp_path):
    u, v = torch.rand(2, 190, generator=torch.Generator().manual_seed(0)).double()
    rows = torch.stack((u, v, 1000 + 5 * u - v * v, 3 * v), 1).tolist()
    (tmp_path / "t.csv").write_text("\n".join(["u,v,y,z", *(",".join(map(str, row)) for row in rows)]))
    file = (f"data.file={tmp_path}/t.csv", "data.targets=[y,z]" if num_targets == 2 else "data.inputs=[u,v]")
    columns = () if num_targets == 2 else ("data.targets=[y]",)
    names = f"workload.metrics=[{','.join(OF_NUMBERS)},r2]"
    words = ("workload=regression", "device=cpu", "model.hidden=[8]", *file, *columns, *COMMON, names)
    (run := tmp_path / "run").mkdir()
    found, outputs, targets = trained(run, mode, ranks, *words)
    held_out = build_composed_run(*words).workload
    held_out.prepare()
    std, mean = (torch.tensor(each).double() for each in (held_out.held_out.target_std, held_out.held_out.target_mean))
    predicted, true = (values.double() * std + mean for values in (outputs, targets))
    errors, both = predicted - true, torch.stack((predicted, true))
    deviations = both - both.mean(1, keepdim=True)
    squares = deviations.square().sum(1) / (len(true) - 1)
    covariance = deviations.prod(0).sum(0) / (len(true) - 1)
    ranked = [torch.corrcoef(both[:, :, i].argsort(1).argsort(1).double())[0, 1] for i in range(num_targets)]
    wanted = {
        "mse": errors.square().mean(),
        "rmse": errors.square().mean(0).sqrt().mean(),
        "mape": (errors / true).abs().mean(),
        "smape": (2 * errors.abs() / (predicted.abs() + true.abs())).mean(),
        "pearson": (covariance / squares.prod(0).sqrt()).mean(),
        "spearman": torch.stack(ranked).mean(),
        "concordance": (2 * covariance / (squares.sum(0) + (both.mean(1)[0] - both.mean(1)[1]).square())).mean(),
        "explained_variance": (1 - errors.var(0) / squares[1]).mean(),
    }
    assert wanted.keys() == OF_NUMBERS.keys()
    assert found.keys() == {*wanted, "loss", "mae", "r2"}
    for name, value in wanted.items():
        assert found[name] == pytest.approx(float(value), rel=1e-4), name


def shards_of(metrics: EvaluationMetrics, outputs: torch.Tensor, targets: torch.Tensor, *sizes: int) -> dict[str, list]:
    """Return the metric sums of processes with so many samples each, seen two at a time, as a mode joins them."""
    joined: dict[str, list] = {}
    for mine in zip(outputs.split(sizes), targets.split(sizes), strict=True):
        tally = metrics.start(CPU)
        for batch in zip(*(each.split(2) for each in mine), strict=True):
            if len(batch[0]):
                tally.update(*batch)
        joined = {key: joined.get(key, []) + value for key, value in tally.sums().items()}
    return joined


def counted_in_rank() -> dict[str, float]:
    """In a rank: how many samples a torchmetrics object and a function see, of 3 of rank 0 and 4 of rank 1."""
    torchmetrics = require("torchmetrics")

    class Count(torchmetrics.Metric):
        full_state_update = False

        def __init__(self) -> None:
            super().__init__()
            self.add_state("count", torch.zeros((), dtype=torch.int64), "sum")

        def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
            self.count += len(outputs)

        def compute(self) -> torch.Tensor:
            return self.count

    metrics = EvaluationMetrics({"states": Count(), "samples": lambda outputs, targets: len(outputs)})
    with DDP().launcher(Device(kind="cpu")).connect() as process:
        tally = metrics.start(CPU)
        tally.update(torch.zeros(3 + process.rank), torch.zeros(3 + process.rank))
        return metrics.compute(process.all_reduce(tally.sums()), CPU)


def test_each_sample_counts_once_among_processes(ranks):
    require("torchmetrics")
    assert ranks(2).call_on_all(counted_in_rank) == [{"states": 7, "samples": 7}] * 2


def test_a_class_without_samples_is_left_out_of_auroc_and_this_is_said_once(caplog):
    metrics, logits = EvaluationMetrics({"auroc": OF_CLASSES["auroc"].function}), torch.eye(3)[:2]
    for _ in range(2):
        found = metrics.compute(shards_of(metrics, logits, torch.arange(2), 1, 1), CPU)
        assert found == {"auroc": 1}
    assert [record.args[0] for record in caplog.records if isinstance(record.args, tuple)] == ["auroc"]


def test_objects_and_functions_of_any_kind_see_each_sample_once_in_order():
    torchmetrics = require("torchmetrics")
    classification = torchmetrics.classification
    generator = torch.Generator().manual_seed(0)
    outputs, targets = torch.rand(11, generator=generator), torch.arange(11) % 3 % 2
    seen = classification.BinaryAUROC()
    seen.update(outputs[:5], 1 - targets[:5])  # which must not count
    objects = {
        "states that are added": classification.BinaryF1Score(),
        "lists": seen,
        "composed": classification.BinaryRecall() + 2 * classification.BinaryPrecision(),
    }
    order: list[torch.Tensor] = []

    def share(outputs: torch.Tensor, targets: torch.Tensor) -> float:
        order.append(outputs)
        return ((outputs > 0.5) == targets).double().mean().item()

    plain = {"function": share, "module": torch.nn.L1Loss(), "number of Python": lambda outputs, targets: 0.1}
    metrics = EvaluationMetrics({**objects, **plain})
    for sizes in ((11,), (6, 5), (4, 4, 3), (11, 0)):
        found = metrics.compute(shards_of(metrics, outputs, targets, *sizes), CPU)
        for name, each in objects.items():
            fresh = each.clone()
            fresh.reset()
            assert found[name] == pytest.approx(float(fresh(outputs, targets)), abs=1e-6), (name, sizes)
        assert found["function"] == pytest.approx(float(((outputs > 0.5) == targets).double().mean()))
        assert found["number of Python"] == 0.1, "all of its digits"
        assert found["module"] == pytest.approx(float((outputs - targets).abs().mean()))
        assert torch.equal(order.pop(), outputs), "in the order of the data set"
        concordance = torchmetrics.regression.ConcordanceCorrCoef()
        own = EvaluationMetrics({"states of its own": concordance})
        found = own.compute(shards_of(own, outputs, targets.double(), *sizes), CPU)
        assert found["states of its own"] == pytest.approx(float(concordance(outputs, targets.double())), abs=1e-6)

    many = EvaluationMetrics({"of two classes": classification.MulticlassF1Score(2, average=None)})
    right = torch.eye(2)[[0, 1, 1]], torch.tensor([0, 1, 0])
    assert many.compute(shards_of(many, *right, 2, 1), CPU) == {"of two classes": pytest.approx(2 / 3)}
    wrong = EvaluationMetrics({"mine": lambda outputs, targets: {"a": 1.0}})
    with pytest.raises(ConfigError) as refused:
        wrong.compute(shards_of(wrong, *right, 3), CPU)
    assert refused.value.key == "metrics.mine"


def logits_of(*shape: int) -> torch.Tensor:
    """Logits near 0, of which most pairs of rows might be probabilities."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7)) * 0.6 + 0.4


@pytest.mark.parametrize("sizes", [(24,), (1, 23), (13, 0, 11)])
def test_objects_that_guess_whether_outputs_are_logits_see_all_samples_at_once(sizes):
    """torchmetrics takes outputs for logits if one of a call is outside [0, 1]."""
    torchmetrics = require("torchmetrics")
    of = torchmetrics.classification
    labels = torch.arange(24) * 5 % 7
    binary, many, hot = labels % 2, labels % 3, torch.nn.functional.one_hot(labels % 3)
    single, three = logits_of(24), logits_of(24, 3)
    cases = [
        *((each(), single, binary) for each in (of.BinaryAccuracy, of.BinaryF1Score, of.BinaryAUROC)),
        (of.BinaryAccuracy(ignore_index=-1), single, binary.where(single >= 0, -1)),
        (of.BinaryStatScores(), single.half(), binary),
        (of.BinaryAveragePrecision(thresholds=20), single, binary),
        (of.BinaryCalibrationError(), single, binary),
        (of.BinaryHingeLoss(), single, binary),
        *((each(3), three, many) for each in (of.MulticlassAUROC, of.MulticlassHingeLoss, of.MulticlassF1Score)),
        (of.MulticlassCalibrationError(3), three, many),
        (of.MultilabelAccuracy(3), three, hot),
        (of.MultilabelRankingLoss(3), three, hot),
        (of.BinaryAccuracy(), single.clamp(0, 1), binary),
        (of.BinaryAccuracy(), (single > 0.4).long(), binary),
        (of.BinaryAccuracy(), single.where(single > -0.5, torch.nan), binary),
        (
            torchmetrics.image.StructuralSimilarityIndexMeasure(),
            logits_of(24, 1, 12, 12),
            logits_of(24, 1, 12, 12) ** 2,
        ),
    ]
    for metric, outputs, targets in cases:
        fresh = metric.clone().set_dtype(torch.float64)
        fresh.update(outputs, targets)
        metrics = EvaluationMetrics({"metric": metric})
        found = metrics.compute(shards_of(metrics, outputs, targets, *sizes), CPU)["metric"]
        assert found == pytest.approx(float(fresh.compute().double().mean()), abs=1e-6, nan_ok=True), (
            metric
        )  # in float32


def test_scores_of_single_samples_are_ordered_as_all_are():
    """Scores from -2 to 1.8, one in each call: torchmetrics takes some for logits, and others for probabilities."""
    torchmetrics = require("torchmetrics")
    scores = torch.arange(-2, 2, 0.2)
    metrics = EvaluationMetrics({"auroc": torchmetrics.AUROC(task="binary")})
    tally = metrics.start(CPU)
    for score in scores:
        tally.update(score[None], (score > 0).long()[None])
    assert metrics.compute(tally.sums(), CPU) == {"auroc": 1}


def test_an_average_over_the_batch_in_a_class_of_a_users_own_is_that_of_all_samples():
    torchmetrics = require("torchmetrics")

    class Worst(torchmetrics.Metric):
        full_state_update = False

        def __init__(self) -> None:
            super().__init__()
            self.add_state("total", torch.zeros(()), "sum")
            self.add_state("count", torch.zeros(()), "sum")

        def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
            self.total += (outputs - targets).abs().max()
            self.count += 1

        def compute(self) -> torch.Tensor:
            return self.total / self.count

    metrics, outputs = EvaluationMetrics({"worst": Worst()}), torch.arange(7.0)
    assert metrics.compute(shards_of(metrics, outputs, torch.zeros(7), 3, 4), CPU) == {"worst": 6}


def test_logits_are_not_kept():
    torchmetrics = require("torchmetrics")
    tally = EvaluationMetrics({"accuracy": torchmetrics.classification.BinaryAccuracy()}).start(CPU)
    for _ in range(50):
        tally.update(torch.tensor([-3.0, 3]), torch.tensor([0, 1]))
    [part] = tally.sums()["evaluation_metrics"]
    assert len(part["samples"]) == 1


@pytest.mark.parametrize(("name", "pick"), [("f1", max), ("calibration_error", min)])
def test_the_best_checkpoint_is_that_of_the_chosen_metric(name, pick, tmp_path):
    words = (*TINY_CPU, "steps=20", "eval_every=4", "optimizer.lr=0.5", "workload.metrics=[f1,calibration_error]")
    found = train_in(tmp_path, build_composed_run(*words, f"workload.best_metric={name}", "keep=1")).result
    values = dict(scalar_curves(tmp_path)[f"eval/{name}"])
    step = pick(values, key=lambda each: (values[each], -each if pick is max else each))
    assert found.best == {"metric": f"eval/{name}", "value": pytest.approx(values[step]), "step": step}
    assert (tmp_path / f"checkpoints/step_{step:08d}").is_dir()
    assert [step for step, _ in scalar_curves(tmp_path)[f"best/{name}"]] == [*values]
    options = compose_config(f"workload.best_metric={name}", "workload.metrics=[f1,calibration_error]")["workload"]
    assert Classifier.best_for(options) == (name, pick.__name__)


def test_names_that_cannot_be_measured_are_refused(monkeypatch, tmp_path):
    for words, key, remedy in (
        (("workload.metrics=[f1,aurok]",), "workload.metrics", "auroc"),
        (("workload=regression", "workload.metrics=[auroc]"), "workload.metrics", "pearson"),
        (("workload.metrics=[rmse]",), "workload.metrics", "f1"),
        (("workload.best_metric=f1",), "workload.best_metric", "accuracy"),
        (("workload.metrics=f1",), "workload.metrics", "conf/workload/classifier.yaml"),
    ):
        with pytest.raises(ConfigError) as refused:
            build_composed_run(*words)
        assert (refused.value.key, remedy in refused.value.remedy) == (key, True), words
    monkeypatch.setitem(sys.modules, "torchmetrics", None)  # it is needed for objects of a user's alone
    words = ("steps=1", "workload.metrics=[accuracy,loss,f1,auroc]")
    assert train_in(tmp_path, build_composed_run(*TINY_CPU, *words)).result.status == "done"


class BestSoFar:
    """A metric that remembers: what it returns depends on all of its calls."""

    best = 0.0

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> float:
        self.calls += 1
        self.best = max(self.best, (outputs == targets).float().mean().item())
        return self.best + self.calls


@pytest.mark.parametrize("method", [False, True])
def test_the_value_of_an_object_depends_on_the_samples_of_one_evaluation_alone(method, caplog):
    given = BestSoFar()
    metrics = EvaluationMetrics({"best": given.__call__ if method else given})

    def evaluated(outputs: list[int]) -> float:
        tally = metrics.start(CPU)
        tally.update(torch.tensor(outputs), torch.tensor([1, 1, 1, 1]))
        return metrics.compute(tally.sums(), CPU)["best"]

    with metrics.trial():
        assert evaluated([1, 1, 1, 1]) == 2
    assert not caplog.text
    assert [evaluated([1, 1, 0, 0]), evaluated([1, 0, 0, 0])] == [1.5, 1.25]
    assert caplog.text.count("metrics.best remembers calls, which begins anew in each evaluation") == 1
    assert (given.best, given.calls) == (0.0, 0)


@pytest.mark.cases(
    (torch.nn.Module(), "it raises NotImplementedError"),
    (lambda *_: (torch.tensor(0.9), 0.01), "it returns (tensor(0.9000), 0.01), and not a number"),
    (lambda *_: torch.tensor(1j), "it returns 1j, and not a number"),
)
def test_what_has_not_one_value_is_refused_on_trial(metric, why):
    metrics = EvaluationMetrics({"m": metric})
    tally = metrics.start(CPU)
    tally.update(torch.tensor([1]), torch.tensor([1]))
    with metrics.trial(), pytest.raises(ConfigError) as refused:
        metrics.compute(tally.sums(), CPU)
    assert (refused.value.key, refused.value.why.startswith(why)) == ("metrics.m", True)
