"""A learning rate that is reduced when an evaluation metric stops improving."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from runner.config.errors import check
from runner.config.limits import Fraction, NonNegativeInt, Range
from runner.schedule import Rates, Schedule
from runner.storage.value_checks import UnexpectedContentError, check_like

log = logging.getLogger(__name__)


@dataclass
class Plateau(Schedule):
    """`torch.optim.lr_scheduler.ReduceLROnPlateau` after a linear warm-up, explained in `conf/schedule/plateau.yaml`.

    Evaluations are the same in all processes, and in all modes, and so is the rate.
    """

    metric: str | None = None
    gamma: Annotated[float, Range(above=0, below=1)] = 0.1
    patience: NonNegativeInt = 10
    threshold: Annotated[float, Range(least=0)] = 1e-4
    threshold_mode: Literal["rel", "abs"] = "rel"
    cooldown: NonNegativeInt = 0
    final: Fraction = 0.0

    def check_evaluations(self, directions: Mapping[str, str], tags: str, eval_every: int) -> None:
        known = {f"eval/{name}" for name in directions}
        why = "evaluations of this workload have no such metric with a known goal;"
        check(self.metric in (None, *known), "schedule.metric", self.metric, why, f"choose from: {tags}")
        if eval_every == 0:  # of debug=smoke, for example
            log.warning("schedule=plateau reduces no learning rate: the only evaluation is at the end (eval_every=0)")

    def build(
        self, directions: Mapping[str, str], selection: tuple[str, str], by_group: Mapping[str, Schedule] | None = None
    ) -> Rates:
        named = selection if self.metric is None else (self.metric, directions[self.metric.removeprefix("eval/")])
        return _OnPlateau(self, f"eval/{named[0].removeprefix('eval/')}", named[1], by_group)


class _OnPlateau(Rates):
    """The rates of a run, and what its evaluations were so far."""

    def __init__(self, options: Plateau, metric: str, direction: str, by_group: Mapping[str, Schedule] | None):
        super().__init__(options, by_group)
        self._options, self._metric, self._is_max = options, metric, direction == "max"
        worst = -math.inf if self._is_max else math.inf
        self._seen: dict[str, Any] = {"metric": metric, "best": worst, "waited": 0, "cooldown": 0, "factor": 1.0}

    @property
    def _scale(self) -> float:
        return self._seen["factor"]

    def evaluated(self, metrics: Mapping[str, float], step: int) -> None:
        options, seen, value = self._options, self._seen, metrics[self._metric]
        margin = options.threshold * (abs(seen["best"]) if options.threshold_mode == "rel" else 1.0)
        margin = 0.0 if math.isinf(seen["best"]) else margin
        is_better = value > seen["best"] + margin if self._is_max else value < seen["best"] - margin
        seen |= {"best": value, "waited": 0} if is_better else {"waited": seen["waited"] + 1}
        if seen["cooldown"] > 0:
            seen |= {"cooldown": seen["cooldown"] - 1, "waited": 0}
        if seen["waited"] > options.patience:
            factor = max(seen["factor"] * options.gamma, options.final)
            seen |= {"factor": factor, "cooldown": options.cooldown, "waited": 0}
            text = "step %d: %s has not improved on %.6g: the learning rate goes on at %.3g × optimizer.lr"
            log.info(text, step, self._metric, seen["best"], factor)

    def state_dict(self) -> dict[str, Any]:
        return dict(self._seen)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not state:  # of another schedule
            return
        like = {"metric": str, "best": float, "waited": int, "cooldown": int, "factor": float}
        check_like(state, like, "the schedule")
        if not 0 <= state["factor"] <= 1:
            raise UnexpectedContentError("the schedule has a factor that is not between 0 and 1")
        now = self._seen | {"factor": state["factor"]}  # another metric has to improve on itself
        self._seen = dict(state) if state["metric"] == self._metric else now
