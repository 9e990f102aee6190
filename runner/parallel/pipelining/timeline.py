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
        """Start a new recording, in which time zero is the moment when all processes have reached `barrier`."""
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

    def end(self) -> None:
        """Stop the recording. Its spans are kept until `take` or the next `begin`."""
        self.on = False

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


class Bubble(NamedTuple):
    """The bubble of a pipeline (the idle fraction of the workers' time), and the times from which it is computed.

    Args:
        seconds: time from the start of the first computation to the end of the last one.
        busy: seconds of computation of each worker.
        least: a lower bound on `seconds` under any schedule, given the same stage times.
        theory: the idle fraction if all stages took the same time: (p − 1) / (v·m + p − 1) for p workers with v stages
            each and m micro-batches (Huang et al., 2019, section 2.3, for v = 1).
    """

    seconds: float
    busy: list[float]
    least: float
    theory: float

    @property
    def share(self) -> float:
        return self._idle(self.seconds)

    @property
    def bound(self) -> float:
        """A lower bound on the idle fraction under any schedule, given the same stage times."""
        return self._idle(self.least)

    def _idle(self, seconds: float) -> float:
        return max(0.0, 1 - sum(self.busy) / (len(self.busy) * seconds)) if seconds else 0.0

    def scalars(self) -> dict[str, float]:
        """Return a dict from TensorBoard tag to scalar: idle fractions, and each worker's busy and idle seconds."""
        shares = {
            "pipeline/bubble": self.share,
            "pipeline/bubble_theory": self.theory,
            "pipeline/bubble_bound": self.bound,
        }
        for worker, busy in enumerate(self.busy):
            shares |= {f"pipeline/worker_{worker}_busy": busy, f"pipeline/worker_{worker}_idle": self.seconds - busy}
        return shares


def bubble(spans: Sequence[Span], num_workers: int) -> Bubble:
    """Return the bubble of a step whose computations are `spans`; stage i is on worker i modulo `num_workers`."""
    num_stages = 1 + max(span.stage for span in spans)
    num_micros = 1 + max(span.micro for span in spans)
    rounds = num_stages // num_workers
    return Bubble(
        seconds=max(span.stop for span in spans) - min(span.start for span in spans),
        busy=[_seconds(spans, set(range(worker, num_stages, num_workers))) for worker in range(num_workers)],
        least=max(_least(spans, worker, num_workers, num_micros - 1) for worker in range(num_workers)),
        theory=(num_workers - 1) / (rounds * num_micros + num_workers - 1),
    )


def _least(spans: Sequence[Span], worker: int, num_workers: int, last: int) -> float:
    """Return a lower bound on the seconds that a step takes under any schedule, from the point of view of `worker`."""
    before = set(range(worker))
    of_worker = {span.stage for span in spans if span.stage % num_workers == worker}
    first, after = _seconds(spans, before, ("forward",), 0), _seconds(spans, before, ("backward",), last)
    busy, deferred = _seconds(spans, of_worker), _seconds(spans, of_worker, ("weights",))
    return first + max(busy, busy - deferred + after)


def _seconds(
    spans: Sequence[Span], stages: set[int], kinds: Sequence[str] | None = None, micro: int | None = None
) -> float:
    return sum(
        span.stop - span.start
        for span in spans
        if span.stage in stages and (kinds is None or span.kind in kinds) and micro in (None, span.micro)
    )
