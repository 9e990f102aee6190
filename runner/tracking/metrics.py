"""Measurements that the training loop collects from one log to the next: metric sums and step times."""

from __future__ import annotations

import itertools
import math
import time
from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch

from runner.config.errors import ABSENT, check
from runner.device import synchronize
from runner.system.section_timer import timer

MetricSums = dict[str, "torch.Tensor"]
"""Sums and counts by name, which can be added over batches and ranks. A metric is a sum divided by a count."""


class Deferred(NamedTuple):
    """What the metric sums of a small micro-batch of n samples will be computed from (see `deferred`)."""

    sample_metrics: Callable[..., torch.Tensor]
    """A function of `tensors`. It returns all metrics of each sample except the loss, [n, num_metrics − 1]."""
    loss: torch.Tensor
    """The mean loss of the micro-batch, a scalar."""
    tensors: tuple[torch.Tensor, ...]
    """Tensors whose first dimension has size n."""


BatchSums: TypeAlias = "torch.Tensor | Deferred"
"""The sums of the training metrics over a micro-batch, float32 [num_metrics]; or what they will be computed from."""

_MAX_DEFERRED_BYTES = 1 << 14


def deferred(sample_metrics: Callable[..., torch.Tensor], loss: torch.Tensor, *tensors: torch.Tensor) -> BatchSums:
    """Return the metric sums of a micro-batch or, if it is small, what `MetricBuffer` will compute them from.

    `MetricBuffer` computes the sums of many small micro-batches together. On small tensors, an operation takes longer
    to start than to compute, and after the step of a network several times as long, because the network displaces the
    code of the metrics from the processor's caches. The computation is not deferred if the tensors exceed 16 KiB, which
    would take memory, or are not on a CPU, as a replay of a CUDA graph overwrites the outputs of the previous one.

    Args:
        sample_metrics: a function that returns all metrics of each sample except the loss, [n, num_metrics − 1].
        loss: the mean loss of the micro-batch, a detached scalar.
        tensors: the arguments of `sample_metrics`, [n, …], detached from the autograd graph. They must not be changed
            later.
    """
    sums = Deferred(sample_metrics, loss, tensors)
    small = sum(tensor.nbytes for tensor in tensors) <= _MAX_DEFERRED_BYTES
    return sums if small and loss.is_cpu else computed(sums)


def computed(sums: BatchSums) -> torch.Tensor:
    """Return the metric sums of a micro-batch, float32 [num_metrics]."""
    return sums if isinstance(sums, torch.Tensor) else _computed_together([sums])[0]


def _stacked(sums: Sequence[BatchSums]) -> torch.Tensor:
    """Return the metric sums of several micro-batches, float32 [len(sums), num_metrics]."""
    later = [each for each in sums if isinstance(each, Deferred)]
    alike = len({(each.sample_metrics, *(tensor.shape for tensor in each.tensors)) for each in later}) == 1
    return _computed_together(later) if alike and len(later) == len(sums) else torch.stack([*map(computed, sums)])


def _computed_together(sums: Sequence[Deferred]) -> torch.Tensor:
    """Return the metric sums of micro-batches of the same size, float32 [len(sums), num_metrics]."""
    first = sums[0]
    tensors = first.tensors if len(sums) == 1 else map(torch.cat, zip(*(each.tensors for each in sums), strict=True))
    size = len(first.tensors[0])
    metrics = first.sample_metrics(*tensors)
    why = f"its sample_metrics returns the shape {list(metrics.shape)} for {size * len(sums)} samples"
    check(metrics.dim() == 2, "workload", ABSENT, why, "return [n, number of metrics without the loss]")
    metrics = metrics.unflatten(0, (len(sums), size))
    totals = metrics.sum(1, dtype=None if metrics.is_floating_point() else torch.float32)
    losses = torch.stack([each.loss for each in sums]).float() * size
    return torch.cat((losses[:, None], totals.float()), 1)


class DivergedError(Exception):
    """Raised when the loss, another metric, or a value of the model or the optimizer state is not finite.

    Args:
        step: the optimizer step at which the value is not finite.
        what: a name for the value, for example `the loss`.
    """

    def __init__(self, step: int, what: str):
        super().__init__(f"{what} is not finite at step {step}")
        self.step, self.what = step, what


_STEPS_PER_BLOCK = 64
_MAX_BLOCKS = 64


class MetricBuffer:
    """The metric sums of each training step, or round of steps (see `Step`), since the last log.

    The sums stay on the device until a log or a checkpoint is due, so that the host does not wait for the device after
    every step. The buffer keeps separate sums for each step, so that `peek` can find the step whose sums are not
    finite. The sums of 64 steps are computed together, if they were deferred, and stacked into one tensor. This takes a
    few bytes per step; one tensor per step would take a kilobyte.

    Args:
        names: the names of the metrics; the first is the loss.
        device: the device of the sums.
    """

    def __init__(self, names: Sequence[str], device: torch.device | str = "cpu"):
        self._names = ["the loss", *(f"train/{name}" for name in names[1:])]
        self._metrics, self._checked = names, False
        self._zeros = torch.zeros(len(names), device=device)  # the sums of a step without micro-batches
        self._step: list[BatchSums] = []  # of the micro-batches of the current step
        self._rows: list[BatchSums] = []  # of the latest steps
        self._blocks: list[torch.Tensor] = []
        self._steps = array("q")

    def load(self, rows: torch.Tensor, step: int) -> None:
        """Replace the content of the buffer with metric sums from a checkpoint.

        Args:
            rows: this rank's share of the metric sums of each step or round (see `Collectives.local_share`), float32
                [num_rows, num_metrics].
            step: the step of the checkpoint. If a sum in `rows` is not finite, `peek` raises a `DivergedError` that
                names this step.
        """
        self._rows, self._blocks, self._steps = [], [rows.to(self._zeros)], array("q", [step] * len(rows))

    def add(self, sums: BatchSums) -> None:
        """Add the metric sums of a micro-batch to the current step.

        Raises:
            ConfigError: if the first ones that are added do not have a value for each metric.
        """
        if not self._checked:
            shape, remedy = list(computed(sums).shape), "name each of them in `metrics`, the loss first"
            why = f"its metric sums have the shape {shape}, but its metrics are {', '.join(self._metrics)}"
            check(shape == [len(self._metrics)], "workload", ABSENT, why, remedy)
            self._checked = True
        self._step.append(sums)
        if len(self._step) == _STEPS_PER_BLOCK:
            self._step = [self._total(self._step)]

    def end_step(self, step: int) -> None:
        """End the current step, after the sums of all its micro-batches have been added; `step` is its number."""
        # Deferred sums of many micro-batches would take memory that a plan of a few micro-batches does not have.
        self._rows.append(self._step[0] if len(self._step) == 1 else self._total(self._step))
        self._steps.append(step)
        self._step = []
        if len(self._rows) == _STEPS_PER_BLOCK:
            self._combine()

    def _combine(self) -> None:
        """Compute the sums of the latest steps, and stack them into one tensor."""
        self._blocks.append(_stacked(self._rows))
        self._rows = []
        if len(self._blocks) == _MAX_BLOCKS:
            self._blocks = [torch.cat(self._blocks)]

    def _total(self, sums: list[BatchSums]) -> torch.Tensor:
        return _stacked(sums).sum(0) if sums else self._zeros

    def peek(self, all_reduce: Callable[[MetricSums], MetricSums]) -> torch.Tensor:
        """Wait for the device, and return the sums over all ranks, float32 [num_rows, num_metrics] on the CPU.

        Args:
            all_reduce: a function that sums tensors over the ranks.

        Raises:
            DivergedError: if a sum is not finite. The error names the first step whose sums are not finite. If the
                processes divide the steps among themselves, each row contains the sums of a round of steps, one step on
                each process. The error then names this process's own step in the first round whose sums are not finite,
                although the step of another process in that round may be the cause.
        """
        if self._rows:
            self._combine()
        if not sum(map(len, self._blocks)):
            return torch.zeros(0, len(self._zeros))
        self._blocks = [torch.cat(self._blocks)]
        values = all_reduce({"train": self._blocks[0]})["train"].cpu()
        broken = values.isfinite().logical_not()
        if broken.any():
            row, metric = broken.nonzero()[0].tolist()
            raise DivergedError(self._steps[row], self._names[metric])
        return values

    def flush(self, all_reduce: Callable[[MetricSums], MetricSums]) -> torch.Tensor:
        """Call `peek`, empty the buffer, and return the sums."""
        values = self.peek(all_reduce)
        self._blocks, self._steps = [], array("q")
        return values


class Measured(NamedTuple):
    """How long the steps of this session took, up to a step after which the host had waited for the devices."""

    step: int
    training: float
    """Seconds without logging, evaluation and saving checkpoints."""
    elapsed: float
    """Seconds with all of them."""


class StepTimer:
    """A timer of training steps. If the processes divide the steps among themselves, it times rounds (see `Step`).

    The host only queues the work of an accelerator, so that the time between two steps says nothing of how long a step
    takes. Therefore, the timer measures windows: the time between two points at which the host has waited for all
    devices, divided by the number of steps. The timer waits at the end of the warm-up, and before each log, evaluation
    and checkpoint. On a CPU, each step is a window.

    Args:
        devices: the devices on which this process computes the steps.
    """

    def __init__(self, devices: Sequence[torch.device]):
        self._devices = [device for device in devices if device.type != "cpu"]
        self._seconds, self._counts = array("d"), array("q")  # of each window, and its number of steps or rounds
        self._logged = 0
        self.start(0, 0)

    def start(self, after_step: int, num_rounds: int) -> None:
        """Start timing the first step or round.

        Args:
            after_step: the last optimizer step that has been done.
            num_rounds: number of steps or rounds that this session has. The first fifth of them, but at most 10, are
                the warm-up.
        """
        self._began = self._started = time.perf_counter()
        self._pauses, self._data = timer.paused(), timer.spent("data")
        self._warm_up, self._rounds, self._open = min(10, max(1, num_rounds // 5)), 0, 0
        self.measured = Measured(after_step, 0.0, 0.0)

    def lap(self, step: int, pausing: bool) -> None:
        """Record the end of a step or round.

        Args:
            step: the number of optimizer steps that have been done.
            pausing: whether a log, an evaluation or a checkpoint follows.
        """
        self._rounds += 1
        self._open += 1
        if pausing or not self._devices or self._rounds == self._warm_up:
            self.end_window(step)

    def end_window(self, step: int) -> None:
        """Wait for the devices, and record the time of the steps or rounds since the last window, if there are any."""
        if not self._open:
            return
        synchronize(*self._devices)
        now, pauses = time.perf_counter(), timer.paused()
        seconds = now - self._started - (pauses - self._pauses)
        self._seconds.append(seconds)
        self._counts.append(self._open)
        self.measured = Measured(step, self.measured.training + seconds, now - self._began)
        self._started, self._pauses, self._open = now, pauses, 0

    def rates(self, samples_per_round: int) -> dict[str, float]:
        """Return averages over the steps or rounds since the last call, in windows that have ended.

        At least one window must have ended since the last call.

        Args:
            samples_per_round: number of samples in a step or round, over all ranks.

        Returns:
            A dict with three tags:

            - `time/samples_per_second`;
            - `time/step_seconds`: the duration of a step or round;
            - `time/data_share`: the fraction of time in which the host waited for data.
        """
        seconds, count = sum(self._seconds[self._logged :]), sum(self._counts[self._logged :])
        data = timer.spent("data")
        data_share = (data - self._data) / seconds
        self._logged, self._data = len(self._seconds), data
        return {
            "time/samples_per_second": samples_per_round * count / seconds,
            "time/step_seconds": seconds / count,
            "time/data_share": data_share,
        }

    def elapsed(self) -> float:
        """Return the seconds since the first step started, including logging, evaluation and saving checkpoints."""
        return time.perf_counter() - self._began

    def steady(self) -> list[float]:
        """Return the seconds of each step or round: the mean of its window.

        The warm-up, whose steps are often slower, is left out unless nothing else was measured.
        """
        times = [(seconds / n, n) for seconds, n in zip(self._seconds, self._counts, strict=True)]
        ended = [*itertools.accumulate(self._counts)]
        steady = [each for each, end in zip(times, ended, strict=True) if end > self._warm_up]
        return [each for each, n in steady or times for _ in range(n)]


def in_words(metrics: dict[str, float]) -> str:
    """Return metrics as one line of text, such as `train/loss 0.2514, train/accuracy 0.9219`."""
    return ", ".join(f"{tag} {value:.6g}" for tag, value in metrics.items())


def quantiles(seconds: list[float]) -> dict[str, float]:
    """Return the `median` and the 90th percentile, `p90`, of `seconds`; an empty dictionary if `seconds` is empty."""
    if not seconds:
        return {}
    ordered = sorted(seconds)
    import statistics  # imported here: config errors need not wait for it

    return {"median": statistics.median(ordered), "p90": ordered[math.ceil(0.9 * len(ordered)) - 1]}
