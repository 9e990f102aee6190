"""What is measured between two logs: the window of training sums, and the stopwatch of steps."""

from __future__ import annotations

import math
import statistics
import time
from array import array
from collections.abc import Callable

import torch

from runner.clock import clock
from runner.device import synchronize
from runner.workloads.base import Sums


class DivergedError(Exception):
    """The loss or the weights stopped being finite."""

    def __init__(self, step: int, what: str):
        super().__init__(f"{what} is not finite at step {step}")
        self.step, self.what = step, what


class Window:
    """The training sums of each step since the last log.

    They stay on the device, so that no step waits for it, until a log or a checkpoint is due.

    Args:
        none: the sums of no sample, [num_metrics] zeros on the device.
        rows: those of an earlier session, [num_metrics] each.
    """

    def __init__(self, none: torch.Tensor, rows: list[torch.Tensor] | None = None):
        self._none, self._rows = none, rows or []
        self._part: torch.Tensor | None = None

    def add(self, sums: torch.Tensor) -> None:
        """Take the sums of a micro-batch, [num_metrics]."""
        self._part = sums if self._part is None else self._part + sums

    def end_step(self) -> None:
        """The step has no more micro-batches."""
        self._rows.append(self._none if self._part is None else self._part)
        self._part = None

    def peek(self, reduce: Callable[[Sums], Sums], last_step: int) -> torch.Tensor:
        """The sums of all ranks: float32 [num_rows, num_metrics], on the CPU; of no step: [0, num_metrics].

        Raises:
            DivergedError: naming the first step whose loss is not finite.
        """
        if not self._rows:
            return torch.zeros(0, len(self._none))
        values = reduce({"train": torch.stack(self._rows)})["train"].cpu()
        finite = values[:, 0].isfinite()
        if not finite.all():
            first = int(finite.logical_not().nonzero()[0])
            raise DivergedError(last_step - len(values) + 1 + first, "the loss")
        return values

    def take(self, reduce: Callable[[Sums], Sums], last_step: int) -> torch.Tensor:
        """What `peek` gives; the window begins anew."""
        values = self.peek(reduce, last_step)
        self._rows = []
        return values


class Stopwatch:
    """How long steps take; logs, evaluations and checkpoints left out.

    Args:
        device: computes the steps.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.seconds = array("d")
        self._logged = 0
        self.start()

    def start(self) -> None:
        """The first step begins now."""
        self._began = self._started = time.perf_counter()
        self._pauses, self._data = _pauses(), clock.spent("data")

    def lap(self, pausing: bool) -> None:
        """A step is done.

        Args:
            pausing: whether a log, an evaluation or a checkpoint follows. They wait for the device anyway, but what it
                still computes is the time of the steps, not theirs.
        """
        if pausing:
            synchronize(self.device)
        now, pauses = time.perf_counter(), _pauses()
        self.seconds.append(now - self._started - (pauses - self._pauses))
        self._started, self._pauses = now, pauses

    def rates(self, round_size: int) -> dict[str, float]:
        """Throughput, and the share of the time that the loop waited for data, since this was asked last."""
        recent, data = self.seconds[self._logged :], clock.spent("data")
        seconds, share = sum(recent), (data - self._data) / sum(recent)
        self._logged, self._data = len(self.seconds), data
        return {
            "time/samples_per_second": round_size * len(recent) / seconds,
            "time/step_seconds": seconds / len(recent),
            "time/data_share": share,
        }

    def elapsed(self) -> float:
        """Seconds since the first step began."""
        return time.perf_counter() - self._began

    def steady(self) -> list[float]:
        """The steps without the warm-up: without the first ten, or a fifth of a short run."""
        return list(self.seconds[min(10, len(self.seconds) // 5) :])


def _pauses() -> float:
    return sum(map(clock.spent, ("log", "evaluate", "checkpoint")))


def quantiles(seconds: list[float]) -> dict[str, float]:
    """Median and 90 % quantile; empty without values."""
    if not seconds:
        return {}
    ordered = sorted(seconds)
    return {"median": statistics.median(ordered), "p90": ordered[math.ceil(0.9 * len(ordered)) - 1]}
