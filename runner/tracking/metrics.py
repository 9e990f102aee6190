"""Measurements that the training loop collects from one log to the next: metric sums and step times."""

from __future__ import annotations

import math
import statistics
import time
from array import array
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from runner.config.errors import ABSENT, ConfigError, check
from runner.device import sum_dtype, synchronize
from runner.system.section_timer import timer

MetricSums = dict[str, Any]
"""Sums and counts by name, tensors that can be added over batches and ranks. A metric is a sum divided by a count.

What cannot be added is in lists of plain values and tensors, which are joined in the order of the ranks.
"""

BatchSums: TypeAlias = "torch.Tensor"
"""The sums and the counts of the training metrics over a micro-batch, [2, num_metrics] in the `sum_dtype`."""


def batch_sums(loss: torch.Tensor, metrics: torch.Tensor, count: torch.Tensor | None = None) -> BatchSums:
    """Return the metric sums of n samples; `loss` is the mean loss, or the sum divided by n of a loss with a `count`.

    `metrics` are the others, [n, num_metrics − 1], whose count is n.
    """
    why = f"its sample_metrics returns the shape {list(metrics.shape)} for {len(metrics)} samples"
    check(metrics.dim() == 2, "workload", ABSENT, why, "return [n, number of metrics without the loss]")
    n, dtype = len(metrics), sum_dtype(loss.device)
    sums = torch.cat((loss.to(dtype)[None] * n, metrics.sum(0, dtype=dtype)))
    counts = torch.full_like(sums, n)
    return torch.stack((sums, counts if count is None else torch.cat((count.to(dtype)[None], counts[1:]))))


class DivergedError(Exception):
    """Raised when the loss, another metric, or a value of the model or the optimizer state is not finite at `step`.

    It is also raised if the count, by which the loss of the step is divided, is not positive.
    """

    def __init__(self, step: int, what: str, why: str = "is not finite"):
        super().__init__(f"{what} {why} at step {step}")
        self.step, self.what = step, what


class MetricBuffer:
    """The metric sums of each training step, or round of steps (see `Step`), since the last log.

    The sums stay on the device until a log or a checkpoint is due, so that the host does not wait for the device after
    every step. Each step has its sums, so that `peek` finds the first that is not finite. The first of the names, which
    may be set later, is that of the loss.
    """

    def __init__(self, names: Sequence[str], device: torch.device | str = "cpu"):
        self.names = tuple(names)
        self._step: list[BatchSums] = []  # of the micro-batches of the current step
        dtype = sum_dtype(torch.device(device))
        self._rows = [torch.zeros(0, 2, len(names), dtype=dtype, device=device)]  # several in each table
        self._steps = array("q")

    def load(self, rows: torch.Tensor, step: int) -> None:
        """Replace the content of the buffer with this rank's share of the metric sums in the checkpoint of `step`.

        `rows` are those of each step or round (see `Collectives.local_share`), [num_rows, 2, num_metrics].
        """
        self._rows, self._steps = [rows.to(self._rows[0])], array("q", [step] * len(rows))

    def add(self, sums: BatchSums | None) -> None:
        """Add the sums of a micro-batch, if this rank has some, to the current step."""
        if sums is not None:
            self._step.append(sums)

    def end_step(self, step: int) -> BatchSums:
        """End the current step, after the sums of all its micro-batches have been added; `step` is its number.

        Returns:
            The sums of this rank over the step.

        Raises:
            ConfigError: if sums are not those of the names.
        """
        shape = (2, len(self.names))
        if self._rows[0].shape[1:] != shape:  # the first step: those of a checkpoint may be of another loss
            self._rows, self._steps = [self._rows[0].new_zeros(0, *shape)], array("q")
        parts = self._step or [self._rows[0].new_zeros(shape)]
        sums = parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)
        if sums.shape != shape:
            why = f"its metric sums have the shape {list(sums.shape)}, but its metrics are {', '.join(self.names)}"
            remedy = "name each of them in `train_metrics`, the loss first, and return what `batch_sums` does"
            raise ConfigError("workload", ABSENT, why, remedy)
        self._rows.append(sums[None])
        self._steps.append(step)
        self._step = []
        if len(self._rows) > 64:  # a tensor takes a kilobyte, and a row of a table a few bytes
            self._rows = [torch.cat(self._rows)]
        return sums

    def peek(self, all_reduce: Callable[[MetricSums], MetricSums]) -> torch.Tensor:
        """Wait for the device, and return the sums over all ranks, [num_rows, 2, num_metrics] on the CPU.

        Raises:
            DivergedError: if a sum is not finite. It names the first such step; if the processes divide the steps among
                themselves, this process's step in the first such round, although that of another may be the cause.
        """
        table = torch.cat(self._rows)
        self._rows = [table]
        if not self._steps:
            return table.cpu()
        values = all_reduce({"train": table})["train"].cpu()
        if (empty := values[:, 1, 0] <= 0).any():
            row = int(empty.nonzero()[0])
            raise DivergedError(self._steps[row], self._shown(0), f"has the count {values[row, 1, 0]:g}, and no mean")
        broken = values.isfinite().logical_not().any(1)
        if broken.any():
            row, metric = broken.nonzero()[0].tolist()
            raise DivergedError(self._steps[row], self._shown(metric))
        return values

    def flush(self, all_reduce: Callable[[MetricSums], MetricSums]) -> dict[str, float]:
        """Call `peek`, empty the buffer, and return the mean of each metric, its sum divided by its count, by name.

        The dict is empty if there were no steps.
        """
        if not self._steps:
            return {}
        sums, counts = self.peek(all_reduce).double().sum(0)
        self._rows, self._steps = [self._rows[0][:0]], array("q")
        return dict(zip(self.names, (sums / counts).tolist(), strict=True))

    def _shown(self, metric: int) -> str:
        return "the loss" if self.names[metric] == "loss" else f"train/{self.names[metric]}"


class StepTimer:
    """A timer of training steps. If the processes divide the steps among themselves, it times rounds (see `Step`).

    The host only queues the work of an accelerator. The timer therefore measures windows, between two points at which
    the host has waited for all devices: at the end of the warm-up, and before each log, evaluation and checkpoint. On a
    CPU, each step is a window.
    """

    def __init__(self, devices: Sequence[torch.device]):
        self._devices = [device for device in devices if device.type != "cpu"]
        self._seconds = array("d")  # of each step or round, the mean of its window
        self._logged = 0
        self.start(0)

    def start(self, num_rounds: int) -> None:
        """Start timing; a fifth of the `num_rounds` steps or rounds of this session, at most 10, are the warm-up."""
        self._began = self._started = time.perf_counter()
        self._pauses, self._data = timer.paused(), timer.spent("data")
        self._warm_up, self._rounds, self._open = min(10, max(1, num_rounds // 5)), 0, 0

    def lap(self, pausing: bool) -> None:
        """Record the end of a step or round; `pausing` is whether a log, an evaluation or a checkpoint follows."""
        self._rounds += 1
        self._open += 1
        if pausing or not self._devices or self._rounds == self._warm_up:
            self.end_window()

    def end_window(self) -> None:
        """Wait for the devices, and record the time of the steps or rounds since the last window, if there are any."""
        if not self._open:
            return
        synchronize(*self._devices)
        now, pauses = time.perf_counter(), timer.paused()
        seconds = now - self._started - (pauses - self._pauses)
        self._seconds.extend([seconds / self._open] * self._open)
        self._started, self._pauses, self._open = now, pauses, 0

    def rates(self, samples_per_round: int, flops_per_sample: int = 0) -> dict[str, float]:
        """Return averages over the windows that have ended since the last call (at least one), by TensorBoard tag.

        `time/data_share` is the fraction of time in which the host waited for data. `samples_per_round` is the number
        of samples in a step or round, over all ranks. `time/tflops` is left out if `flops_per_sample` is 0.
        """
        seconds, count = sum(self._seconds[self._logged :]), len(self._seconds) - self._logged
        before, self._data, self._logged = self._data, timer.spent("data"), len(self._seconds)
        rate = samples_per_round * count / seconds
        return {
            "time/samples_per_second": rate,
            "time/step_seconds": seconds / count,
            "time/data_share": (self._data - before) / seconds,
            **({"time/tflops": rate * flops_per_sample / 1e12} if flops_per_sample else {}),
        }

    def elapsed(self) -> float:
        """Return the seconds since the first step started, including logging, evaluation and saving checkpoints."""
        return time.perf_counter() - self._began

    def steady(self) -> list[float]:
        """Return the seconds of each step or round, the mean of its window, without the warm-up unless it is all."""
        return [*(self._seconds[self._warm_up :] or self._seconds)]  # a window ends with the warm-up


def in_words(metrics: dict[str, float]) -> str:
    """Return metrics as one line of text, such as `train/loss 0.2514, train/accuracy 0.9219`."""
    return ", ".join(f"{tag} {value:.6g}" for tag, value in metrics.items())


def quantiles(seconds: list[float]) -> dict[str, float]:
    """Return the `median` and the 90th percentile, `p90`, of `seconds`; an empty dictionary if `seconds` is empty."""
    if not seconds:
        return {}
    ordered = sorted(seconds)
    return {"median": statistics.median(ordered), "p90": ordered[math.ceil(0.9 * len(ordered)) - 1]}
