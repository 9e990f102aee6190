"""Learning rate schedules: a factor for the learning rate, as a pure function of the number of updates.

It has no state to save, even if loss scaling has skipped steps. That of `runner.plateau` depends on evaluations, too.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import torch

from runner.config import user_code
from runner.config.errors import ABSENT, check, did_you_mean, errors_under
from runner.config.limits import Fraction, NonNegativeInt, Range
from runner.config.options import option_contents
from runner.config.schema import load_class, typed_values

log = logging.getLogger(__name__)


@dataclass
class Schedule:
    """A constant learning rate after a linear warm-up; the base class of all schedules."""

    warmup: Annotated[float, Range(least=0, below=1.0)] | NonNegativeInt = 0.0

    def __post_init__(self) -> None:
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

    @property
    def is_stretched(self) -> bool:
        """Whether the factors of a run depend on its length."""
        return 0 < self.warmup < 1 or type(self).after_warmup is not Schedule.after_warmup

    def check_length(self, num_steps: int) -> None:
        """Say that a run of `num_steps` steps ends before the warm-up does."""
        if num_steps and self.num_warmup(num_steps) >= num_steps:
            text = "schedule.warmup=%s: the run ends after %d steps, before the warm-up, with %.3g × optimizer.lr"
            log.warning(text, self.warmup, num_steps, self.factor(num_steps - 1, num_steps))

    def check_evaluations(self, directions: Mapping[str, str], eval_every: int) -> None:
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
    """The learning rates of a run with a `schedule`; some groups may have their own. This class has no state."""

    _scale = 1.0

    def __init__(self, schedule: Schedule, by_group: Mapping[str, Schedule] | None = None):
        self.schedule, self._by_group = schedule, by_group or {}

    def set_lr(self, optimizer: torch.optim.Optimizer, update: int, num_updates: int) -> None:
        """Set the learning rate of `optimizer` for the update with index `update` (see `Schedule.factor`)."""
        factors = {name: each.factor(update, num_updates) for name, each in self._by_group.items()}
        factors[""] = self._scale * self.schedule.factor(update, num_updates)
        for group in optimizer.param_groups:
            rate = factors[group.get("schedule", "")] * group.setdefault("initial_lr", group["lr"])
            if isinstance(group["lr"], torch.Tensor):  # of a compiled step, which reads its memory
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

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
    """A `function` of the user's, which returns the factor for a step after the warm-up, of a number of steps."""

    function: Callable[[int, int], Any] = lambda step, num_steps: 1.0

    def after_warmup(self, update: int, num_updates: int) -> float:
        with user_code.errors_of("schedule"):
            value = self.function(update, num_updates)
            is_number = hasattr(value, "__float__") and "bool" not in str(getattr(value, "dtype", type(value)))
            factor = float(value) if is_number else math.nan
        why = f"the function{user_code.place(self.function)} returned it for step {update} of {num_updates}"
        check(0 <= factor <= _MOST, "schedule", value, why, f"a factor of optimizer.lr is a number ≥ 0 and ≤ {_MOST:,}")
        return factor

    def check_length(self, num_steps: int) -> None:
        super().check_length(num_steps)
        count = num_steps - self.num_warmup(num_steps)
        steps = sorted({*range(0, count, math.ceil(count / _MAX_TRIED) or 1), *range(count)[-1:]})
        factors, again = ([self.after_warmup(step, count) for step in order] for order in (steps, reversed(steps)))
        where = user_code.place(self.function)
        for step, factor, other in zip(steps, factors, reversed(again), strict=True):
            why = f"for step {step} the function{where} returned {factor}, and then {other}"
            check(factor == other, "schedule", ABSENT, why, "let it depend on step and num_steps alone")
        if factors:
            log.info("schedule: the function%s, %.3g to %.3g × optimizer.lr", where, min(factors), max(factors))


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
    why, remedy = f"code gives a schedule, too{user_code.place(function)}", "leave out schedule=…, or that function"
    check(type(schedule) is Schedule, "schedule", type(schedule).__name__.lower(), why, remedy)
    return Function(schedule.warmup, function)


def of_option(given: Any) -> Schedule:
    """Return the schedule of a group of parameters: `cosine`, or `{name: cosine, warmup: 100}`.

    Raises:
        ConfigError: if it is none, or one that depends on evaluations.
    """
    node = dict(given) if isinstance(given, Mapping) else {"name": given}
    name, known = str(node.pop("name", None) or ""), option_contents("schedule")
    example = "for example constant, or {name: cosine, warmup: 0.1}"
    check(bool(name), "schedule", given, "it has no name", example)
    check(name in known, "schedule", name, "there is no such schedule;", did_you_mean(name, known))
    options = {**known[name], **node}
    cls = load_class(options.pop("_target_"), Schedule)
    why = "it follows the evaluations of the run, of all groups"
    check(cls.build is Schedule.build, "schedule", name, why, f"schedule={name}, or another one here")
    with errors_under("schedule"):
        return cls(**typed_values(cls, options))


def _cosine(start: float, end: float, fraction: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * fraction)) / 2
