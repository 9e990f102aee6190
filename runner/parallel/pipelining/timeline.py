"""The times at which the stages of a pipeline compute, and the bubble: the idle fraction of the workers' time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from runner.device import synchronize


class Span(NamedTuple):
    """One computation of a stage on a micro-batch, from `start` to `stop`, in seconds since the recording began.

    `kind` is `forward`, `backward`, or, if the schedule computes the gradients of weights separately, `weights`.
    """

    stage: int
    kind: str
    micro: int
    start: float
    stop: float


class Timeline:
    """A recording of the computations of this process's stages. While `on` is false, nothing is recorded.

    On CUDA, events on the streams measure the times: the host waits only before a recording, and when it is read.

    Args:
        devices: devices of the stages.
    """

    def __init__(self, devices: Sequence[torch.device]):
        self.devices = list(dict.fromkeys(devices))
        self.on = False
        self._records: list[tuple[int, str, int, torch.device, Any, Any]] = []
        self._origins: dict[torch.device, Any] = {}

    def begin(self, barrier: Callable[[], None]) -> None:
        """Start a recording, in which time zero is the moment when all processes have reached `barrier`.

        It is on until `on` is set to false; its spans are kept until `take` or the next recording.
        """
        self._records, self.on = [], True
        for device in self.devices:
            synchronize(device)
        barrier()
        self._origins = {device: _now(device) for device in self.devices}

    @contextmanager
    def span(self, stage: int, kind: str, micro: int, device: torch.device) -> Iterator[None]:
        """Record the computation inside the context, with its start and stop on `device`."""
        if not self.on:
            yield
            return
        start = _now(device)
        yield
        self._records.append((stage, kind, micro, device, start, _now(device)))

    def take(self) -> list[Span]:
        """Return the recorded spans, and clear the recording."""
        if not self._records:
            return []
        for device in self.devices:
            synchronize(device)
        spans = [
            Span(stage, kind, micro, *(_between(self._origins[device], moment) for moment in times))
            for stage, kind, micro, device, *times in self._records
        ]
        self._records, self._origins = [], {}
        return spans


def _now(device: torch.device) -> Any:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def _between(start: Any, stop: Any) -> float:
    return stop - start if isinstance(start, float) else start.elapsed_time(stop) / 1000


def bubble(spans: Sequence[Span], num_workers: int) -> dict[str, float]:
    """Return the bubble of a step whose computations are `spans`, by TensorBoard tag, and the times of each worker.

    Stage i is on worker i modulo `num_workers`. The bubble is the idle fraction of the workers' time, from the start of
    the first computation to the end of the last one. `pipeline/bubble_theory` is that of stages that all take the same
    time: (p − 1) / (v·m + p − 1) for p workers with v stages each and m micro-batches (Huang et al., 2019, section 2.3,
    for v = 1). `pipeline/bubble_bound` is a lower bound under any schedule, given the same stage times. Times are in
    seconds.
    """
    num_stages, num_micros = 1 + max(span.stage for span in spans), 1 + max(span.micro for span in spans)
    seconds = max(span.stop for span in spans) - min(span.start for span in spans)
    busy = [_seconds(spans, set(range(worker, num_stages, num_workers))) for worker in range(num_workers)]
    least = 0.0  # a lower bound on the seconds of the step
    for worker in range(num_workers):
        before, of_worker = set(range(worker)), set(range(worker, num_stages, num_workers))
        first = _seconds(spans, before, ("forward",), 0)
        after, deferred = (
            _seconds(spans, before, ("backward",), num_micros - 1),
            _seconds(spans, of_worker, ("weights",)),
        )
        least = max(least, first + max(busy[worker], busy[worker] - deferred + after))
    found = {
        "pipeline/bubble": 1 - sum(busy) / (num_workers * max(seconds, 1e-9)),
        "pipeline/bubble_theory": (num_workers - 1) / (num_stages // num_workers * num_micros + num_workers - 1),
        "pipeline/bubble_bound": max(0.0, 1 - sum(busy) / (num_workers * max(least, 1e-9))),
    }
    for worker, of_worker in enumerate(busy):
        found |= {f"pipeline/worker_{worker}_busy": of_worker, f"pipeline/worker_{worker}_idle": seconds - of_worker}
    return found


def _seconds(
    spans: Sequence[Span], stages: set[int], kinds: Sequence[str] | None = None, micro: int | None = None
) -> float:
    return sum(
        span.stop - span.start
        for span in spans
        if span.stage in stages and (kinds is None or span.kind in kinds) and micro in (None, span.micro)
    )
