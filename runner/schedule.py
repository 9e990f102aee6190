"""Schedules: a factor of the learning rate, and of other options, as a pure function of the number of updates.

It has no state to save, even if loss scaling has skipped steps. That of `runner.plateau` depends on evaluations, too.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import torch

from runner.config import functions, user_code
from runner.config.errors import ABSENT, check, did_you_mean, errors_under
from runner.config.limits import Fraction, NonNegativeInt, Range
from runner.config.options import option_contents
from runner.config.schema import load_class, typed_values
from runner.torch_optimizer import SCHEDULED, scale_option, value_of_option

log = logging.getLogger(__name__)


@dataclass
class Schedule:
    """A constant learning rate after a linear warm-up; the base class of all schedules."""

    warmup: Annotated[float, Range(least=0, below=1.0)] | NonNegativeInt = 0.0
    options: dict[str, Any] | None = None  # not {}: Hydra would refuse to override it

    def __post_init__(self) -> None:
        self._others = dict[str, Schedule]()
        for name, given in (self.options or {}).items():
            with errors_under("options"):
                known = did_you_mean(name, SCHEDULED)
                check(name in SCHEDULED, name, given, "it is no option that a schedule can change;", known)
                self._others[name] = of_option(given, name)
                check(not self._others[name].options, name, given, "it has options, too", "write them beside it")
        why = "it is neither a number of steps, of which one is no warm-up, nor a fraction of the run, which is below 1"
        check(self.warmup != 1, "warmup", self.warmup, why, "schedule.warmup=500 or schedule.warmup=0.05, for example")

    def num_warmup(self, num_updates: int) -> int:
        """Return the number of updates of the warm-up, of a run with `num_updates` updates."""
        return int(self.warmup) if self.warmup > 1 else round(self.warmup * num_updates)

    def factor(self, update: int, num_updates: int) -> float:
        """Return the factor for the update with index `update`, counted from 0, of a run with `num_updates` updates."""
        warmup = self.num_warmup(num_updates)
        if update < warmup:
            return (update + 1) / warmup
        return self.after_warmup(update - warmup, max(num_updates - warmup, 1))

    def after_warmup(self, update: int, num_updates: int) -> float:
        """Return the factor after the warm-up; `update` and `num_updates` are counted from its end."""
        return 1.0

    def factors(self, update: int, num_updates: int) -> dict[str, float]:
        """Return what `factor` does for each option of the optimizer that has a schedule, by name, first `lr`."""
        others = {name: each.factor(update, num_updates) for name, each in self._others.items()}
        return {"lr": self.factor(update, num_updates), **others}

    @property
    def is_stretched(self) -> bool:
        """Whether the factors of a run depend on its length."""
        changes = type(self).after_warmup is not Schedule.after_warmup
        return 0 < self.warmup < 1 or changes or any(each.is_stretched for each in self._others.values())

    def check_length(self, num_steps: int) -> None:
        """Say that a run of `num_steps` steps ends before the warm-up does."""
        if num_steps and self.num_warmup(num_steps) >= num_steps:
            text = "schedule.warmup=%s: the run ends after %d steps, before the warm-up, with %.3g × optimizer.lr"
            log.warning(text, self.warmup, num_steps, self.factor(num_steps - 1, num_steps))

    def check_evaluations(self, directions: Mapping[str, str], tags: str, eval_every: int) -> None:
        """Raise `ConfigError` if the schedule needs an evaluation that the run does not have (see `Stop`)."""

    def build(
        self, directions: Mapping[str, str], selection: tuple[str, str], by_group: Mapping[str, Schedule] | None = None
    ) -> Rates:
        """Return the rates of a run.

        `directions` has the `min` or `max` of each evaluation metric; `selection` is the metric that selects the best
        checkpoint, and its own; `by_group` has the schedules of groups of parameters that have their own, by pattern.
        """
        return Rates(with_function(self), by_group)


class Rates:
    """The learning rates of a run with a `schedule`; some groups may have their own. This class has no state.

    Other options of the optimizer that have a schedule are set, too.
    """

    _scale = 1.0

    def __init__(self, schedule: Schedule, by_group: Mapping[str, Schedule] | None = None):
        self.schedule, self._by_group = schedule, by_group or {}

    def set_lr(self, optimizer: torch.optim.Optimizer, update: int, num_updates: int) -> None:
        """Set the options of `optimizer` for the update with index `update` (see `Schedule.factors`)."""
        factors = {name: each.factors(update, num_updates) for name, each in self._by_group.items()}
        factors[""] = self.schedule.factors(update, num_updates)
        factors[""]["lr"] *= self._scale
        for group in optimizer.param_groups:
            for name, factor in factors[group.get("schedule", "")].items():
                scale_option(group, name, factor)

    def others(self, optimizer: torch.optim.Optimizer, num_updates: int) -> list[str]:
        """Return the names of the options besides `lr` that have a schedule, in a run with `num_updates` updates.

        Raises:
            ConfigError: if `optimizer` does not have one of them.
        """
        found: list[str] = []
        for pattern, schedule in {"": self.schedule, **self._by_group}.items():
            groups = [group for group in optimizer.param_groups if group.get("schedule", "") == pattern]
            for name in [*schedule.factors(0, max(1, num_updates))][1:]:
                key = f"optimizer.groups.{pattern}.schedule" if pattern else "schedule"
                why = "the optimizer has no such option, or it is 0"
                remedy = f"optimizer.{name}=…, or the schedule of one of {', '.join(SCHEDULED)}"
                check(any(value_of_option(each, name) for each in groups), f"{key}.options", name, why, remedy)
                found.append(name)
        return found

    def evaluated(self, metrics: Mapping[str, float], step: int) -> None:
        """Take the evaluation after `step` into account: the value of each metric by tag, the same on all ranks."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state`, which `state_dict` returned, perhaps that of another schedule."""


@dataclass
class Linear(Schedule):
    """A linear fall of the factor from 1 to `final`."""

    final: Fraction = 0.0

    def after_warmup(self, update: int, num_updates: int) -> float:
        return 1 + (self.final - 1) * update / num_updates


@dataclass
class Cosine(Schedule):
    """Cosine annealing of the factor from 1 to `final` (Loshchilov and Hutter, SGDR, 2017), without restarts."""

    final: Fraction = 0.0

    def after_warmup(self, update: int, num_updates: int) -> float:
        return self.final + (1 - self.final) * (1 + math.cos(math.pi * update / num_updates)) / 2


@dataclass
class OneCycle(Schedule):
    """The one-cycle policy: the factor follows a cosine from 1/`start_div` to 1, then to 1/(`start_div`·`final_div`).

    Smith and Topin, Super-Convergence (2018), as in `torch.optim.lr_scheduler.OneCycleLR`, but with constant momentum.
    `optimizer.lr` is the maximum learning rate; `rise` is the fraction of the updates before it is reached.
    """

    rise: Annotated[float, Range(above=0, most=0.99)] = 0.3
    start_div: Annotated[float, Range(least=1, most=1e12)] = 25.0
    final_div: Annotated[float, Range(least=1, most=1e12)] = 1e4

    def after_warmup(self, update: int, num_updates: int) -> float:
        start = 1 / self.start_div
        peak = self.rise * num_updates - 1
        if peak > 0 and update <= peak:
            return _cosine(start, 1.0, update / peak)
        return _cosine(1.0, start / self.final_div, (update - peak) / max(num_updates - 1 - peak, 1e-9))


@dataclass
class Step(Schedule):
    """Step decay: the factor is multiplied by `gamma` at each milestone, a fraction of the run after the warm-up."""

    milestones: tuple[float, ...] = (0.5, 0.75)
    gamma: Annotated[float, Range(above=0, most=1)] = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        given, remedy = list(self.milestones), "for example schedule.milestones=[0.5,0.75]"
        valid = given == sorted(given) and all(0 < milestone < 1 for milestone in given)
        why = "they must be fractions of the run between 0 and 1, in increasing order"
        check(valid, "milestones", given, why, remedy)

    def after_warmup(self, update: int, num_updates: int) -> float:
        # In floating point 0.55 * 100 exceeds 55: without a tolerance, the decay would be one update late.
        return self.gamma ** sum(update >= milestone * num_updates - 1e-6 for milestone in self.milestones)


_MOST = 1_000_000
"""The largest factor: a larger one is a mistake, and the learning rate might overflow."""

_MAX_TRIED = 1000
"""The number of steps, besides the last one, for which a function of the user's is tried before the first one."""


@dataclass
class Function(Schedule):
    """A `function` of the user's, which returns the factor for a step after the warm-up, of a number of steps.

    It may also return a dict of the factors of several options: `{"lr": 1.0, "weight_decay": 0.5}`.
    """

    function: Callable[[int, int], Any] = lambda step, num_steps: 1.0

    def after_warmup(self, update: int, num_updates: int) -> float:
        return self._given(update, num_updates)["lr"]

    def factors(self, update: int, num_updates: int) -> dict[str, float]:
        warmup = self.num_warmup(num_updates)
        found = self._given(max(update - warmup, 0), max(num_updates - warmup, 1))
        found |= {name: each.factor(update, num_updates) for name, each in self._others.items()}
        return found | ({"lr": (update + 1) / warmup} if update < warmup else {})

    def _given(self, update: int, num_updates: int) -> dict[str, float]:
        """Return the factors that the function gives by name, first that of `lr`."""
        with user_code.errors_of("schedule"):
            value = self.function(update, num_updates)
            values = value if isinstance(value, Mapping) else {"lr": value}
            factors = {name: _number(each) for name, each in values.items()}
        why = f"the function{functions.place(self.function)} returned it for step {update} of {num_updates}"
        for name, factor in factors.items():
            known = did_you_mean(str(name), ("lr", *SCHEDULED))
            check(name in ("lr", *SCHEDULED) and name not in self._others, "schedule", name, f"{why};", known)
            most = _MOST if name in ("lr", "weight_decay") else 1
            remedy = f"a factor of optimizer.{name} is a number ≥ 0 and ≤ {most:,}"
            check(0 <= factor <= most, "schedule", values[name], why, remedy)
        return {"lr": 1.0} | factors

    def check_length(self, num_steps: int) -> None:
        super().check_length(num_steps)
        count = num_steps - self.num_warmup(num_steps)
        steps = sorted({*range(0, count, math.ceil(count / _MAX_TRIED) or 1), *range(count)[-1:]})
        found, again = ([self._given(step, count) for step in order] for order in (steps, reversed(steps)))
        where = functions.place(self.function)
        for name in found[0] if found else ():
            factors, others = ([each.get(name, math.nan) for each in several] for several in (found, reversed(again)))
            for step, factor, other in zip(steps, factors, others, strict=True):
                why = f"for step {step} the function{where} returned {factor}, and then {other}"
                check(factor == other, "schedule", ABSENT, why, "let it depend on step and num_steps alone")
            log.info("schedule: the function%s, %.3g to %.3g × optimizer.%s", where, min(factors), max(factors), name)


def _number(value: Any) -> float:
    is_number = hasattr(value, "__float__") and "bool" not in str(getattr(value, "dtype", type(value)))
    return float(value) if is_number else math.nan


def with_function(schedule: Schedule) -> Schedule:
    """Return `schedule`, with the function that is given as the user's `schedule`, if there is one.

    Raises:
        ConfigError: if it is not a function of (step, num_steps), or another schedule is chosen, too.
    """
    function = user_code.function_of(
        "schedule", ("step", "num_steps"), "return factor; another name, such as _schedule, if it is a helper"
    )
    if function is None:
        return schedule
    why, remedy = f"code gives a schedule, too{functions.place(function)}", "leave out schedule=…, or that function"
    check(type(schedule) is Schedule, "schedule", type(schedule).__name__.lower(), why, remedy)
    return Function(schedule.warmup, schedule.options, function)


def of_option(given: Any, key: str = "schedule") -> Schedule:
    """Return the schedule that is given as `key`, of a group or of an option: `cosine`, or `{name: cosine, warmup: 9}`.

    Raises:
        ConfigError: if it is none, or one that depends on evaluations.
    """
    node = dict(given) if isinstance(given, Mapping) else {"name": given}
    name, known = str(node.pop("name", None) or ""), option_contents("schedule")
    example = "for example constant, or {name: cosine, warmup: 0.1}"
    check(bool(name), key, given, "it has no name", example)
    check(name in known, key, name, "there is no such schedule;", did_you_mean(name, known))
    options = {**known[name], **node}
    cls = load_class(options.pop("_target_"), Schedule)
    why = "it follows the evaluations of the run, of all groups"
    check(cls.build is Schedule.build, key, name, why, f"schedule={name}, or another one here")
    with errors_under(key):
        return cls(**typed_values(cls, options))


def _cosine(start: float, end: float, fraction: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * fraction)) / 2
