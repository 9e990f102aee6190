"""What the workloads of a user's file have in common: its network, its data, and what selects the best checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from runner.batching import Plan
from runner.config import user_code
from runner.config.errors import ABSENT, check, did_you_mean, errors_under
from runner.data.base import Samples
from runner.data.user import UserData
from runner.model.user import UserModel
from runner.workloads.named_metrics import OF_CLASSES_OR_NUMBERS, Named
from runner.workloads.samples import SampleWorkload


@dataclass
class UserCodeWorkload(SampleWorkload[Samples]):
    """A workload whose loss, or whose step, is code of the user."""

    best_metric: str | None = None
    best_goal: Literal["min", "max"] | None = None

    named_metrics: ClassVar[Mapping[str, Named]] = OF_CLASSES_OR_NUMBERS
    code_parts: ClassVar[tuple[str, ...]] = ()
    """The parts of a user's code that this workload takes (see `user_code.PARTS`); it refuses those of others."""
    other_metrics: ClassVar[str] = (
        "; for another of yours, also workload.best_metric=NAME workload.best_goal=max, or min"
    )

    @classmethod
    def best_for(cls, options: Mapping[str, Any]) -> tuple[str, str]:
        name = options.get("best_metric") or "loss"
        return name, options.get("best_goal") or (cls.named_metrics[name].goal if name in cls.named_metrics else "min")

    def check_best(self, measured: Iterable[str]) -> None:
        """Refuse a `best_metric` that is not `measured`, or of which it is not known whether a high value is good."""
        name = self.best_metric
        remedy = did_you_mean(name or "", measured)
        check(name in (None, *measured), "workload.best_metric", name, "evaluations do not measure it;", remedy)
        has_goal = self.best_goal is not None or name in (None, "loss", *self.named_metrics)
        why, remedy = f"whether a high {name} is good is not known", f"workload.best_metric={name} "
        check(has_goal, "workload.best_goal", None, why, remedy + "workload.best_goal=max, or min")

    def check_plan(self, plan: Plan) -> None:
        self._batch_size = plan.batch_size  # of which a part has its share in a loss that is a sum

    def prepare(self) -> None:
        options = {"model": isinstance(self.model, UserModel), "data": isinstance(self.data, UserData)}
        user_code.check_unused((group for group, is_given in options.items() if is_given), self.code_parts)
        is_used = options["data"] or user_code.find("collate") is None
        check(is_used, "collate", ABSENT, "this data makes its own batches", "leave it out, or give data of your own")
        for part in ("training_step", "phases"):
            why = "it is found only if the file defines it or imports it by its name"
            check(part in self.code_parts or user_code.find(part) is None, part, ABSENT, why, f"import {part} by name")
        super().prepare()

    def usable(self, samples: Samples) -> Samples:
        return samples

    def use(self, train: Samples, held_out: Samples) -> None:
        self._num_outputs = len(getattr(train, "class_names", None) or ())
        super().use(train, held_out)

    @property
    def num_outputs(self) -> int:
        why, remedy = "the number of outputs is not known", "pass tensors, or a data set with a list `classes`"
        is_needed = not isinstance(self.model, UserModel) or "num_classes" in self.model.needed_sizes()
        check(self._num_outputs > 0 or not is_needed, "data", ABSENT, why, remedy)
        return self._num_outputs

    def saved_model(self, signature: Mapping[str, Any]) -> torch.nn.Module:
        if isinstance(self.model, UserModel) and not self.model.needed_sizes():
            with errors_under("model"):
                return self.model.build((), 0)
        return super().saved_model(signature)
