"""Image classification with cross-entropy loss."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch

from runner.batching import MicroBatch, Plan
from runner.config.errors import ConfigError, check
from runner.config.limits import Range
from runner.config.options import chosen_option
from runner.data.augment import Mixing
from runner.data.base import Batch, DataError, LabeledSamples, Samples
from runner.device import sum_dtype
from runner.tracking.image_grids import class_shares, confusion_matrix, grid
from runner.tracking.metrics import MetricSums
from runner.workloads.cross_entropy import CrossEntropyWorkload
from runner.workloads.evaluation_metrics import EvaluationMetrics
from runner.workloads.named_metrics import OF_CLASSES, OF_COUNTS, Named, class_counts
from runner.workloads.supervised import comparable

log = logging.getLogger(__name__)

_MAX_IMAGES = 36  # in a grid
_MAX_CLASSES = 1000  # in a confusion matrix


@dataclass
class Classifier(CrossEntropyWorkload[LabeledSamples]):
    """The training and evaluation of an image classifier; for options, see `conf/workload/classifier.yaml`."""

    balance_classes: bool = False
    mixup: Annotated[float, Range(least=0, most=1000)] = 0.0
    cutmix: Annotated[float, Range(least=0, most=1000)] = 0.0
    top5: bool = False

    train_metrics: ClassVar[tuple[str, ...]] = ("loss", "accuracy")
    best: ClassVar[tuple[str, str]] = ("accuracy", "max")
    best_possible: ClassVar[Mapping[str, float]] = {"accuracy": 1, "top5_accuracy": 1, "loss": 0}
    outputs_are_scores: ClassVar[bool] = True
    named_metrics: ClassVar[Mapping[str, Named]] = OF_CLASSES

    def __post_init__(self) -> None:
        super().__post_init__()
        why, is_set = "workload.class_weights sets the weights already", self.class_weights is not None
        check(not (is_set and self.balance_classes), "balance_classes", True, why, "leave one of the two out")

    def usable(self, samples: Samples) -> LabeledSamples:
        if isinstance(samples, LabeledSamples):
            return samples
        why, name = "its samples have no classes", chosen_option("data", self.data)
        raise ConfigError("data", name, why, "use data=digits, for example, or workload=regression for numbers")

    def use(self, train: Samples, held_out: Samples) -> None:
        super().use(train, held_out)
        count = self.train.num_classes
        why = f"all predictions are right among the {count} classes of this data"
        check(not self.top5 or count > 5, "workload.top5", True, why, "workload.top5=false")
        self.check_num_classes(count, ", or set workload.balance_classes=true")
        why, remedy = "data.sampler=weighted draws all classes equally often", "leave one of the two out"
        is_twice = self.balance_classes and self.train.weights is not None
        check(not is_twice, "workload.balance_classes", True, why, remedy)
        if self.balance_classes:
            counts = torch.bincount(self.train.labels(), minlength=count)
            self._weights = counts.sum() / (count * counts.double().clamp(min=1))
        if count == 1:
            log.warning("data: all samples have the class %s: there is nothing to learn", self.train.class_names[0])

    def describe(self) -> dict[str, str]:
        shape, classes = "×".join(map(str, self.train.shape)), self.train.num_classes
        return {"data": f"{self.summary()} of {shape}, {classes:,} classes"}

    def eval_metrics(self) -> dict[str, str]:
        return {"accuracy": "max", "loss": "min"} | ({"top5_accuracy": "max"} if self.top5 else {}) | self.extra.goals

    def extra_metrics(self) -> EvaluationMetrics:
        """Return the metrics for which the outputs of all samples are kept; counts of classes are enough for others."""
        return super().extra_metrics().without(OF_COUNTS)

    @property
    def num_outputs(self) -> int:
        return self.train.num_classes

    def signature(self) -> dict[str, Any]:
        samples = self.held_out
        return {"inputs": samples.shape, "classes": samples.class_names, "image": samples.image_input()}

    def batches_of(self, plan: Plan, micros: Iterable[MicroBatch], device: torch.device) -> Iterator[Batch]:
        if mixing := Mixing(self.mixup, self.cutmix):
            return mixing.batches(self.train, micros, plan.batch_size, plan.seed, device)
        return super().batches_of(plan, micros, device)

    @property
    def loss_form(self) -> tuple[tuple[str, ...], bool]:
        return self.train_metrics, self._weights is not None

    def criterion(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, Any]:
        """Return the mean cross-entropy of logits [n, num_classes], or its sum and count; targets are as in `Batch`."""
        if self._weights is None:
            return torch.nn.functional.cross_entropy(outputs, targets, label_smoothing=self.label_smoothing)
        return self.cross_entropy(outputs, targets)

    def sample_metrics(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        labels = targets if targets.dim() == 1 else targets.argmax(1)
        return (outputs.argmax(1) == labels)[:, None]

    def evaluate(
        self, infer: Callable[[torch.Tensor], torch.Tensor], shard: tuple[int, int], device: torch.device
    ) -> MetricSums:
        sums = {"loss": torch.zeros((), dtype=sum_dtype(device), device=device)}
        # `predictions` and `targets` are the class index plus 1 of each sample of the shard that could be read, and 0
        # for all others; `confidence` is in 1/1000, so that a rounding error does not change which are shown.
        shapes = {"top5": ()} | dict.fromkeys(("predictions", "targets", "confidence"), (len(self.held_out),))
        sums |= {name: torch.zeros(shape, dtype=torch.int64, device=device) for name, shape in shapes.items()}
        tally = self.extra.start(device)
        for indices, batch in self.held_out.in_order_with_indices(self.eval_batch_size, shard, device):
            outputs, _ = comparable(infer(batch.inputs), batch.targets)
            sums["loss"] += torch.nn.functional.cross_entropy(outputs, batch.targets, reduction="sum")
            if self.top5:
                # Of equal outputs, the first ones, as in `argmax`.
                best = outputs.sort(dim=1, descending=True, stable=True).indices[:, :5]
                sums["top5"] += (best == batch.targets[:, None]).sum()
            sums["predictions"][indices] = outputs.argmax(1) + 1
            sums["targets"][indices] = batch.targets + 1
            sums["confidence"][indices] = (1000 * outputs.softmax(1).amax(1)).round().long()
            tally.update(outputs, batch.targets)
        return sums | tally.sums()

    def summarize(self, sums: MetricSums) -> dict[str, float]:
        predicted, targets = _read(sums)
        if not (count := len(targets)):
            raise DataError("the held-out images", "none of them can be read", "check that they are images")
        means = {"loss": float(sums["loss"]) / count, "accuracy": int((predicted == targets).sum()) / count}
        means |= {"top5_accuracy": int(sums["top5"]) / count} if self.top5 else {}
        counts = class_counts(predicted, targets, self.held_out.num_classes).double()
        means |= {name: float(OF_COUNTS[name](*counts)) for name in self._names if name in OF_COUNTS}
        return means | self.extra.compute(sums, sums["loss"].device)

    def details(self, sums: MetricSums) -> dict[str, Any]:
        """Return the precision, the recall and F1 of each class; None if it has no samples or no predictions."""
        counts = self._confusion(sums)
        if counts is None:
            return {}
        right, samples, predicted = counts.diagonal().double(), counts.sum(1), counts.sum(0)
        ratios = (samples, right / predicted, right / samples, 2 * right / (samples + predicted))
        numbers = ([None if math.isnan(each) else each for each in ratio.tolist()] for ratio in ratios)
        names, keys = self.held_out.class_names, ("class", "samples", "precision", "recall", "f1")
        classes = [dict(zip(keys, row, strict=True)) for row in zip(names, *numbers, strict=True)]
        return {"classes": classes, "confusion": counts.tolist()}

    def _confusion(self, sums: MetricSums) -> torch.Tensor | None:
        num_classes, (predicted, targets) = self.held_out.num_classes, _read(sums)
        if num_classes > _MAX_CLASSES:
            return None
        counts = torch.bincount(targets * num_classes + predicted, minlength=num_classes**2)
        return counts.view(num_classes, num_classes)

    def vote(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return the logarithm of the mean of the models' class probabilities, [n, num_classes]."""
        return outputs.log_softmax(-1).logsumexp(0) - math.log(len(outputs))

    def images(self, sums: MetricSums) -> dict[str, torch.Tensor]:
        predictions, targets = sums["predictions"].cpu() - 1, sums["targets"].cpu() - 1
        confidence = sums["confidence"].cpu()
        seen, wrong = (targets >= 0).nonzero().flatten(), (predictions != targets).nonzero().flatten()
        spaced = torch.linspace(0, len(seen) - 1, min(_MAX_IMAGES, len(seen)), dtype=torch.float64).long()
        surest = confidence[wrong].argsort(descending=True, stable=True)[:_MAX_IMAGES]
        shown = {"eval/samples": seen[spaced], "eval/misclassified": wrong[surest]}
        names, images = self.held_out.class_names, {}
        for tag, rows in shown.items():
            if not len(rows):
                continue
            captions, good = [], (predictions[rows] == targets[rows]).tolist()
            for predicted, target, sure in torch.stack((predictions, targets, confidence), 1)[rows].tolist():
                caption = f"{names[predicted]} {sure / 10:.0f}%"
                captions.append(caption if predicted == target else f"{caption}\nis {names[target]}")
            images[tag] = grid(self.held_out.display_images(rows.tolist()), captions, good)
        if (counts := self._confusion(sums)) is not None:
            images["eval/confusion"] = confusion_matrix(counts, names)
            images["eval/class_accuracy"] = class_shares(counts, names)
        return images


def _read(sums: MetricSums) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the predicted and the true classes of the samples that could be read, int64 [n] on the CPU."""
    predictions, targets = sums["predictions"].cpu(), sums["targets"].cpu()
    return predictions[targets > 0] - 1, targets[targets > 0] - 1
