"""Regression: the prediction of one or several numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch.nn import functional

from runner.config.errors import ConfigError
from runner.config.limits import Range
from runner.config.options import chosen_option
from runner.data.base import RegressionSamples, Samples
from runner.device import sum_dtype
from runner.tracking.metrics import MetricSums
from runner.workloads.named_metrics import OF_NUMBERS, Named
from runner.workloads.supervised import DataWorkload, comparable


@dataclass
class Regression(DataWorkload[RegressionSamples]):
    """The training and evaluation of a network that predicts numbers; for options, see `conf/workload/regression.yaml`.

    The loss, of standardized targets, is the mean over samples and targets. The metric `mae` is in the units of the
    data. `r2` is 1 − Σ(y − ŷ)² / Σ(y − ȳ)² of the held-out samples, averaged over targets: 1 is perfect, and 0 is as
    good as predicting the mean ȳ.
    """

    loss_function: Literal["mse", "mae", "huber"] = "mse"
    huber_delta: Annotated[float, Range(above=0)] = 1.0

    train_metrics: ClassVar[tuple[str, ...]] = ("loss", "mae")
    best: ClassVar[tuple[str, str]] = ("loss", "min")
    best_possible: ClassVar[Mapping[str, float]] = {"loss": 0, "mae": 0, "r2": 1}
    named_metrics: ClassVar[Mapping[str, Named]] = OF_NUMBERS

    def use(self, train: Samples, held_out: Samples) -> None:
        super().use(train, held_out)
        self._scale: torch.Tensor | None = None

    def usable(self, samples: Samples) -> RegressionSamples:
        if isinstance(samples, RegressionSamples):
            return samples
        why, name = "its samples have no numbers to predict", chosen_option("data", self.data)
        raise ConfigError("data", name, why, "use data=tabular, or workload=classifier for classes")

    def describe(self) -> dict[str, str]:
        shape, names = "×".join(map(str, self.train.shape)), self.train.target_names
        shape += f" value{'s' * (shape != '1')}" if len(self.train.shape) == 1 else ""
        targets = f"{len(names)} targets" if len(names) > 1 else f"target {names[0]}"
        return {"data": f"{self.summary()} of {shape}, {targets}"}

    def eval_metrics(self) -> dict[str, str]:
        return {"loss": "min", "mae": "min", "r2": "max"} | self.extra.goals

    @property
    def num_outputs(self) -> int:
        return len(self.train.target_names)

    def signature(self) -> dict[str, Any]:
        samples = self.train
        names = {"columns": samples.input_names} if samples.input_names else {}
        scale = samples.standardization()
        return {"inputs": samples.shape, "targets": samples.target_names, "scale": scale} | names

    def criterion(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of outputs and targets, both [n, num_targets]."""
        return self._losses(*comparable(outputs, targets)).mean()

    def _losses(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        huber_loss = partial(functional.huber_loss, delta=self.huber_delta)
        losses = {"mse": functional.mse_loss, "mae": functional.l1_loss, "huber": huber_loss}
        return losses[self.loss_function](outputs, targets, reduction="none")

    def sample_metrics(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        outputs, targets = comparable(outputs, targets)
        return ((outputs - targets).abs() * self._std(outputs)).mean(1, keepdim=True)

    def _std(self, like: torch.Tensor) -> torch.Tensor:
        if self._scale is None or (self._scale.device, self._scale.dtype) != (like.device, like.dtype):
            self._scale = torch.tensor(self.train.target_std, dtype=like.dtype, device=like.device)
        return self._scale

    def evaluate(
        self, infer: Callable[[torch.Tensor], torch.Tensor], shard: tuple[int, int], device: torch.device
    ) -> MetricSums:
        num_targets = len(self.held_out.target_names)
        dtype = sum_dtype(device)
        names = ("loss", "absolute", "squared", "target", "target_squared")
        sums = {name: torch.zeros(num_targets, dtype=dtype, device=device) for name in names}
        sums["count"] = torch.zeros((), dtype=torch.int64, device=device)
        tally, samples = self.extra.start(device), self.held_out
        scale = [torch.tensor(each, dtype=dtype, device=device) for each in (samples.target_std, samples.target_mean)]
        for batch in self.held_out.in_order(self.eval_batch_size, shard, device):
            outputs, targets = (values.to(dtype) for values in comparable(infer(batch.inputs), batch.targets))
            errors = outputs - targets
            sums["loss"] += self._losses(outputs, targets).sum(0)
            sums["absolute"] += errors.abs().sum(0)
            sums["squared"] += errors.square().sum(0)
            sums["target"] += targets.sum(0)
            sums["target_squared"] += targets.square().sum(0)
            sums["count"] += len(targets)
            tally.update(*(values * scale[0] + scale[1] for values in (outputs, targets)))
        return sums | tally.sums()

    def summarize(self, sums: MetricSums) -> dict[str, float]:
        extra = self.extra.compute(sums, sums["loss"].device)
        count, names = int(sums["count"]), ("loss", "absolute", "squared", "target", "target_squared")
        sums = {name: sums[name].cpu().double() for name in names}
        std = torch.tensor(self.held_out.target_std, dtype=torch.float64)
        variation = sums["target_squared"] - sums["target"].square() / count
        # Where all targets are equal, R² is not defined; as in scikit-learn, it is then 1 if all are predicted, else 0.
        varies = variation > 1e-12 * sums["target_squared"]  # by more than rounding errors
        ratio = sums["squared"] / torch.where(varies, variation, torch.ones_like(variation))
        r2 = torch.where(varies, 1 - ratio, (sums["squared"] == 0).double())
        return {
            "loss": float(sums["loss"].mean()) / count,
            "mae": float((sums["absolute"] * std).mean()) / count,
            "r2": float(r2.mean()),
            **extra,
        }
