"""The rules that end a run before its last step, after an evaluation or when its time is up."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from runner.config.errors import check
from runner.config.limits import PositiveInt, Range
from runner.storage.value_checks import check_like


@dataclass
class Stop:
    """The rules that end a run early, explained in `conf/stop/default.yaml`; null is no rule.

    `patience` (early stopping; Prechelt, Early Stopping – But When?, 1998) and `target` are applied after each
    evaluation. They end the run as if it had reached its last step.
    """

    metric: str | None = None
    patience: PositiveInt | None = None
    min_delta: Annotated[float, Range(least=0)] = 0.0
    target: Annotated[float, Range()] | None = None
    max_time: Annotated[float, Range(above=0)] | None = None

    def __post_init__(self) -> None:
        for key in ("patience", "target"):
            why = "no metric is named that it could be applied to"
            named = self.metric is not None or getattr(self, key) is None
            check(named, key, getattr(self, key), why, "for example stop.metric=eval/loss")
        used = self.metric is None or self.patience is not None or self.target is not None
        check(used, "metric", self.metric, "no rule uses it", "stop.patience=5, stop.target=VALUE, or stop.metric=null")
        why, remedy = "it says what counts as an improvement, and stop.patience is null", "stop.patience=5"
        check(self.min_delta == 0 or self.patience is not None, "min_delta", self.min_delta, why, remedy)

    def check_evaluations(
        self, directions: Mapping[str, str], tags: str, eval_every: int, best_possible: Mapping[str, float] = {}
    ) -> None:
        """Raise `ConfigError` if `metric` is set and evaluations do not measure it, or cannot reach `target`.

        `directions` has the `min` or `max` of each metric by which a run may end, `tags` says which to choose from, and
        `best_possible` has the best value of some; there is one evaluation in `eval_every` steps, or only one at the
        end if it is 0.
        """
        if self.metric is None:
            return
        is_known = self.metric in {f"eval/{name}" for name in directions}
        why, remedy = "a run of this workload cannot end by it;", f"choose from: {tags}"
        check(is_known, "stop.metric", self.metric, why, remedy)
        why = "the only evaluation is at the end of the run (eval_every=0)"
        remedy = "eval_every=N evaluates every N steps, eval_every=null once per epoch, or ten times without epochs"
        check(eval_every > 0, "stop.metric", self.metric, why, remedy)
        name = self.metric.rpartition("/")[2]
        if self.target is not None and name in best_possible:
            best, is_max = best_possible[name], directions[self.metric.removeprefix("eval/")] == "max"
            why = f"it is never reached: {self.metric} is at {'most' if is_max else 'least'} {best:g}"
            reached = self.target <= best if is_max else self.target >= best
            percent = is_max and best == 1 and self.target <= 100
            remedy = f"stop.target={self.target / 100:g}" if percent else "set a value that it can reach"
            check(reached, "stop.target", self.target, why, remedy)

    def build(self, directions: Mapping[str, str]) -> Stopping:
        """Return an object that applies the rules to a run; for `directions`, see `check_evaluations`."""
        return Stopping(self, directions.get((self.metric or "").removeprefix("eval/"), "max"))


class Stopping:
    """The rules of a run, and the evaluations that they are applied to; better values are the `min` or the `max`."""

    def __init__(self, options: Stop, direction: str):
        self._options, self._sign = options, 1 if direction == "max" else -1
        self._max_time = math.inf if options.max_time is None else options.max_time
        # The `best` evaluation, its `best_step`, the `latest`, and how many were `waited` for since the best.
        self._seen: dict[str, Any] = {}
        self.asked = ""  # why a hook of the user ends the run

    def evaluated(self, metrics: Mapping[str, float], step: int) -> None:
        """Take the evaluation after `step` into account: the value of each metric by tag, the same on all ranks."""
        metric, seen = self._options.metric, self._seen
        if metric is None:
            return
        value, worst = metrics[metric], -self._sign * math.inf
        value = value if math.isfinite(value) else worst  # it is not defined: no improvement
        if not seen or self._sign * (value - seen["best"]) > self._options.min_delta:
            self._seen = {"metric": metric, "best": value, "best_step": step, "latest": value, "waited": 0}
        else:
            self._seen = seen | {"latest": value, "waited": seen["waited"] + 1}

    @property
    def reason(self) -> str:
        """The rule that ends the run after the latest evaluation, in words; empty if the run goes on."""
        if self.asked:
            return self.asked
        seen, target, patience = self._seen, self._options.target, self._options.patience
        if seen and target is not None and self._sign * (seen["latest"] - target) >= 0:
            return f"stop.target: {seen['metric']} is {seen['latest']:.6g}"
        if seen and patience is not None and seen["waited"] >= patience:
            times = f"{seen['waited']} evaluation{'s' * (seen['waited'] > 1)}"
            best = f"{seen['best']:.6g} (step {seen['best_step']})"
            return f"stop.patience: {seen['metric']} has not improved on {best} in {times}"
        return ""

    def out_of_time(self, seconds: float) -> str:
        """Return the rule `max_time` in words if `seconds` have passed since the first step; otherwise, ""."""
        return "" if seconds < self._max_time else f"stop.max_time: {self._max_time:g} s have passed"

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint; empty before the first evaluation, or if no rule uses evaluations."""
        return self._seen

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state`, which `state_dict` returned, unless it is of another `metric`."""
        if state:
            like = {"metric": str, "best": float, "best_step": int, "latest": float, "waited": int}
            check_like(state, like, "stop")
        self._seen = state if state.get("metric") == self._options.metric else {}
