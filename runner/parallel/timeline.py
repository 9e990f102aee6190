"""What each stage of a pipeline does when, and how long it waits: the bubble."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from runner.device import synchronize


class Span(NamedTuple):
    """A stage at work on a micro-batch, from `start` to `stop`: seconds since the schedule began.

    `kind` is `forward`, `backward`, or `weights`, where a schedule puts off the gradients of the weights.
    """

    stage: int
    kind: str
    micro: int
    start: float
    stop: float


class Timeline:
    """Notes what the stages of this process do, while it is `on`; otherwise it costs nothing.

    On CUDA the times are of events on the devices' streams: the host waits once, before it begins, and once where
    they are read.

    Args:
        devices: that compute.
    """

    def __init__(self, devices: Sequence[torch.device]):
        self.devices = list(dict.fromkeys(devices))
        self.on = False
        self._marks: list[tuple[int, str, int, torch.device, Any, Any]] = []
        self._origins: dict[torch.device, Any] = {}

    def begin(self, barrier: Callable[[], None]) -> None:
        """A new time line, whose zero is when all processes are here."""
        self._marks, self.on = [], True
        for device in self.devices:
            synchronize(device)
        barrier()
        self._origins = {device: _now(device) for device in self.devices}

    @contextmanager
    def span(self, stage: int, kind: str, micro: int, device: torch.device) -> Iterator[None]:
        """Work of `stage` on `device`, for as long as the context lasts."""
        if not self.on:
            yield
            return
        start = _now(device)
        yield
        self._marks.append((stage, kind, micro, device, start, _now(device)))

    def end(self) -> None:
        """Note no more."""
        self.on = False

    def take(self) -> list[Span]:
        """What was noted, once."""
        if not self._marks:
            return []
        for device in self.devices:
            synchronize(device)
        spans = [
            Span(stage, kind, micro, *(_between(self._origins[device], mark) for mark in marks))
            for stage, kind, micro, device, *marks in self._marks
        ]
        self._marks, self._origins = [], {}
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
    """How the time of a schedule was spent.

    Args:
        seconds: from its first work to its last.
        busy: seconds at work, by worker.
        least: the seconds that no schedule can stay below, as the measured times of these stages are.
        theory: the idle share of equal stages: (p − 1) / (m + p − 1) (Huang et al., 2019, section 2.3).
    """

    seconds: float
    busy: list[float]
    least: float
    theory: float

    @property
    def share(self) -> float:
        """The idle share of the workers' time."""
        return self._idle(self.seconds)

    @property
    def bound(self) -> float:
        """The idle share that the stages' measured times leave at the least."""
        return self._idle(self.least)

    def _idle(self, seconds: float) -> float:
        return max(0.0, 1 - sum(self.busy) / (len(self.busy) * seconds)) if seconds else 0.0

    def scalars(self) -> dict[str, float]:
        """By TensorBoard tag."""
        shares = {
            "pipeline/bubble": self.share,
            "pipeline/bubble_theory": self.theory,
            "pipeline/bubble_bound": self.bound,
        }
        for worker, busy in enumerate(self.busy):
            shares |= {f"pipeline/busy_{worker}": busy, f"pipeline/idle_{worker}": self.seconds - busy}
        return shares


def bubble(spans: Sequence[Span], num_workers: int) -> Bubble:
    """The bubble of a schedule whose stage i is at worker i modulo `num_workers`."""
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
    """The seconds that pass at the least, seen from one worker.

    Nothing reaches it before the stages in front of it had the first micro-batch, and their backward passes of the
    `last` one follow its own. Gradients of weights may be put off until after those.
    """
    before = set(range(worker))
    own = {span.stage for span in spans if span.stage % num_workers == worker}
    first, after = _seconds(spans, before, ("forward",), 0), _seconds(spans, before, ("backward",), last)
    busy, put_off = _seconds(spans, own), _seconds(spans, own, ("weights",))
    return first + max(busy, busy - put_off + after)


def _seconds(
    spans: Sequence[Span], stages: set[int], kinds: Sequence[str] | None = None, micro: int | None = None
) -> float:
    """The time of the work of `stages`: of all kinds, or some; on all micro-batches, or one."""
    return sum(
        span.stop - span.start
        for span in spans
        if span.stage in stages and (kinds is None or span.kind in kinds) and micro in (None, span.micro)
    )
