"""What is measured between two logs: the metric sums of each step, and how long the steps take."""

from __future__ import annotations

import math
import statistics
import time
from array import array
from collections.abc import Callable

import torch

from runner.device import synchronize
from runner.system.section_timer import timer

MetricSums = dict[str, "torch.Tensor"]
"""Metrics as sums and counts, which add up over batches and ranks; means are taken at the end."""


class DivergedError(Exception):
    """The loss or the weights stopped being finite."""

    def __init__(self, step: int, what: str):
        super().__init__(f"{what} is not finite at step {step}")
        self.step, self.what = step, what


class MetricBuffer:
    """The metric sums of each training step since the last log.

    They stay on the device until a log or a checkpoint is due, so that no step waits for it.

    Args:
        zeros: [num_metrics], on the device.
        rows: those of an earlier session, [num_metrics] each.
    """

    def __init__(self, zeros: torch.Tensor, rows: list[torch.Tensor] | None = None):
        self._zeros, self._rows = zeros, rows or []
        self._step: torch.Tensor | None = None

    def add(self, sums: torch.Tensor) -> None:
        """Add the sums of a micro-batch, [num_metrics]."""
        self._step = sums if self._step is None else self._step + sums

    def end_step(self) -> None:
        """All micro-batches of the step are added."""
        self._rows.append(self._zeros if self._step is None else self._step)
        self._step = None

    def peek(self, all_reduce: Callable[[MetricSums], MetricSums], last_step: int) -> torch.Tensor:
        """The sums over all ranks, a row for each step: float32 [num_steps, num_metrics], on the CPU.

        Raises:
            DivergedError: naming the first step whose loss is not finite.
        """
        if not self._rows:
            return torch.zeros(0, len(self._zeros))
        values = all_reduce({"train": torch.stack(self._rows)})["train"].cpu()
        finite = values[:, 0].isfinite()
        if not finite.all():
            first = int(finite.logical_not().nonzero()[0])
            raise DivergedError(last_step - len(values) + 1 + first, "the loss")
        return values

    def flush(self, all_reduce: Callable[[MetricSums], MetricSums], last_step: int) -> torch.Tensor:
        """What `peek` returns; the buffer is empty after it."""
        values = self.peek(all_reduce, last_step)
        self._rows = []
        return values


class StepTimer:
    """How long steps take, without logs, evaluations and checkpoints.

    Args:
        device: that computes the steps.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.seconds = array("d")
        self._logged = 0
        self.start()

    def start(self) -> None:
        """The first step starts now."""
        self._began = self._started = time.perf_counter()
        self._pauses, self._data = timer.paused(), timer.spent("data")

    def lap(self, pausing: bool) -> None:
        """A step is done.

        Args:
            pausing: whether a log, an evaluation or a checkpoint follows. Each waits for the device anyway; waiting
                here counts what the device still computes as the steps' time, not as theirs.
        """
        if pausing:
            synchronize(self.device)
        now, pauses = time.perf_counter(), timer.paused()
        self.seconds.append(now - self._started - (pauses - self._pauses))
        self._started, self._pauses = now, pauses

    def rates(self, samples_per_round: int) -> dict[str, float]:
        """Throughput, and the share of the time spent waiting for data, since the last call, by TensorBoard tag."""
        recent, data = self.seconds[self._logged :], timer.spent("data")
        seconds, share = sum(recent), (data - self._data) / sum(recent)
        self._logged, self._data = len(self.seconds), data
        return {
            "time/samples_per_second": samples_per_round * len(recent) / seconds,
            "time/step_seconds": seconds / len(recent),
            "time/data_share": share,
        }

    def elapsed(self) -> float:
        """Seconds since the first step began."""
        return time.perf_counter() - self._began

    def steady(self) -> list[float]:
        """The seconds of each step without the warm-up: the first ten steps, or a fifth of a short run."""
        return list(self.seconds[min(10, len(self.seconds) // 5) :])


def in_words(metrics: dict[str, float]) -> str:
    """Metrics in one line: `train/loss 0.2514, train/accuracy 0.9219`."""
    return ", ".join(f"{tag} {value:.6g}" for tag, value in metrics.items())


def quantiles(seconds: list[float]) -> dict[str, float]:
    """Median and 90 % quantile; empty without values."""
    if not seconds:
        return {}
    ordered = sorted(seconds)
    return {"median": statistics.median(ordered), "p90": ordered[math.ceil(0.9 * len(ordered)) - 1]}
