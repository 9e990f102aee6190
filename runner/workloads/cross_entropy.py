"""The options of the cross-entropy of classes: label smoothing and class weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import torch

from runner.config.errors import check
from runner.config.limits import Range
from runner.workloads.losses import summed_cross_entropy
from runner.workloads.samples import S
from runner.workloads.supervised import DataWorkload


@dataclass
class CrossEntropyWorkload(DataWorkload[S]):
    """A workload whose loss is, or may be, the cross-entropy of classes; as in torch, a mean over their weights."""

    label_smoothing: Annotated[float, Range(least=0, below=1)] = 0.0
    class_weights: list[float] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._weights: torch.Tensor | None = None
        if self.class_weights is not None:
            valid = any(self.class_weights) and all(0 <= weight < math.inf for weight in self.class_weights)
            why, remedy = "weights are finite and not negative, and not all 0", "as in workload.class_weights=[1,2.5]"
            check(valid, "class_weights", self.class_weights, why, remedy)
            self._weights = torch.tensor(self.class_weights, dtype=torch.float64)

    def check_num_classes(self, count: int, more: str = "") -> None:
        """Raise `ConfigError` unless there are as many weights as classes, of which there are `count`."""
        given, remedy = self.class_weights, f"give {count} weights{more}"
        fits = given is None or len(given) == count
        check(fits, "workload.class_weights", given, f"there are {count} classes", remedy)

    def cross_entropy(self, outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weighted, smoothed sum and its count, of logits [n, num_classes, …]."""
        weights, dtype = self._weights, torch.promote_types(outputs.dtype, torch.float32)
        if weights is not None and (weights.device, weights.dtype) != (outputs.device, dtype):
            weights = self._weights = weights.to(outputs.device, dtype)  # once, not in every step
        return summed_cross_entropy(outputs, targets, weights, self.label_smoothing)
