"""Learning rate schedules: a factor on the optimizer's learning rate, as a pure function of the update.

Being pure, a schedule has no state to save, and a resumed run, or one whose loss scaling skipped a step, is at the
right place by its count of updates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from runner.config.errors import check, check_range


@dataclass
class Schedule:
    """A constant learning rate, and what every schedule has: a linear warm-up.

    Args:
        warmup: share of the run, 0 to 1, over which the factor rises from 0 in equal steps.
    """

    warmup: float = 0.0

    def __post_init__(self) -> None:
        check_range(self, "warmup", least=0, most=1)

    def factor(self, update: int, num_updates: int) -> float:
        """What the learning rate is multiplied with at `update`, counted from 0, of `num_updates`."""
        warmup = round(self.warmup * num_updates)
        if update < warmup:
            return (update + 1) / warmup
        return self.after_warmup(update - warmup, max(num_updates - warmup, 1))

    def after_warmup(self, update: int, num_updates: int) -> float:
        """The factor once the warm-up is over; `update` counts from its end."""
        return 1.0

    def set_lr(self, optimizer: torch.optim.Optimizer, update: int, num_updates: int) -> None:
        """Give `optimizer` the learning rate of `update`."""
        factor = self.factor(update, num_updates)
        for group in optimizer.param_groups:
            group["lr"] = factor * group.setdefault("initial_lr", group["lr"])


@dataclass
class Cosine(Schedule):
    """Half a cosine from 1 to `final` (Loshchilov and Hutter, SGDR, 2017, without restarts)."""

    final: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "final", least=0, most=1)

    def after_warmup(self, update: int, num_updates: int) -> float:
        return self.final + (1 - self.final) * (1 + math.cos(math.pi * update / num_updates)) / 2


@dataclass
class OneCycle(Schedule):
    """Up from 1/`start_div` to 1 in `rise` of the run, then down to 1/(`start_div`·`final_div`), both along a cosine.

    Smith and Topin, Super-Convergence (2018); the shape of `torch.optim.lr_scheduler.OneCycleLR`, momentum unchanged.
    `optimizer.lr` is the peak.
    """

    rise: float = 0.3
    start_div: float = 25.0
    final_div: float = 1e4

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "rise", above=0, most=0.99)
        check_range(self, "start_div", least=1, most=1e12)
        check_range(self, "final_div", least=1, most=1e12)

    def after_warmup(self, update: int, num_updates: int) -> float:
        start = 1 / self.start_div
        peak = self.rise * num_updates - 1
        if peak > 0 and update <= peak:
            return _cosine(start, 1.0, update / peak)
        return _cosine(1.0, start / self.final_div, (update - peak) / max(num_updates - 1 - peak, 1e-9))


@dataclass
class Step(Schedule):
    """Times `gamma` at each of `milestones`, shares of the run after its warm-up; torch's `MultiStepLR`."""

    milestones: tuple[float, ...] = (0.5, 0.75)
    gamma: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "gamma", above=0, most=1)
        ordered = list(self.milestones) == sorted(self.milestones)
        inside = all(math.isfinite(m) and 0 < m < 1 for m in self.milestones)
        check(
            ordered and inside,
            "milestones",
            list(self.milestones),
            "they must be shares of the run between 0 and 1, in rising order",
            "schedule.milestones=[0.5,0.75]",
        )

    def after_warmup(self, update: int, num_updates: int) -> float:
        # 0.55 * 100 is a little more than 55: without a tolerance the milestone would come one update late
        return self.gamma ** sum(update >= share * num_updates - 1e-6 for share in self.milestones)


def _cosine(start: float, end: float, share: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * share)) / 2
