"""The times at which the stages of a pipeline compute, their bubble (the idle fraction), and their picture."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from runner.device import synchronize
from runner.system.accelerator import has_streams
from runner.tracking.image_grids import font, to_tensor


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
    """A recording of the computations of this process's stages, on `devices`. While `on` is false, it records nothing.

    On CUDA, events on the streams measure the times: the host waits only before a recording, and when it is read.
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
        synchronize(*self.devices)
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
        synchronize(*self.devices)
        spans = [
            Span(stage, kind, micro, *(_between(self._origins[device], moment) for moment in times))
            for stage, kind, micro, device, *times in self._records
        ]
        self._records, self._origins = [], {}
        return spans


def _now(device: torch.device) -> Any:
    if not has_streams(device):
        return time.perf_counter()
    event = torch.Event(device, enable_timing=True)
    event.record(torch.accelerator.current_stream(device))
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
        first = _seconds(spans, before, "forward", 0)
        after, deferred = _seconds(spans, before, "backward", num_micros - 1), _seconds(spans, of_worker, "weights")
        least = max(least, first + max(busy[worker], busy[worker] - deferred + after))
    found = {
        "pipeline/bubble": 1 - sum(busy) / (num_workers * max(seconds, 1e-9)),
        "pipeline/bubble_theory": (num_workers - 1) / (num_stages // num_workers * num_micros + num_workers - 1),
        "pipeline/bubble_bound": max(0.0, 1 - sum(busy) / (num_workers * max(least, 1e-9))),
    }
    for worker, of_worker in enumerate(busy):
        found |= {f"pipeline/worker_{worker}_busy": of_worker, f"pipeline/worker_{worker}_idle": seconds - of_worker}
    return found


def _seconds(spans: Sequence[Span], stages: set[int], kind: str | None = None, micro: int | None = None) -> float:
    return sum(
        span.stop - span.start
        for span in spans
        if span.stage in stages and kind in (None, span.kind) and micro in (None, span.micro)
    )


COLORS = {
    "forward": ((66, 133, 244), (120, 170, 255)),
    "backward": ((52, 140, 90), (110, 185, 140)),
    "weights": ((214, 140, 40), (238, 186, 110)),
}
"""For each kind of computation: the color of a worker's first stage, and the color of the worker's other stages."""

_WIDTH, _ROW, _BAR, _MARGIN, _TOP, _BOTTOM = 1000, 46, 36, 74, 44, 50
_INK, _IDLE, _LINE, _WHITE = (40, 40, 40), (235, 235, 235), (205, 205, 205), (255, 255, 255)


def gantt(spans: Sequence[Span], num_workers: int, title: str) -> torch.Tensor:
    """Draw a Gantt chart of one step, with a row for each worker: an RGB image, uint8 [3, height, width]."""
    from PIL import Image, ImageDraw

    begin, end = min(span.start for span in spans), max(span.stop for span in spans)
    scale, bottom = (_WIDTH - _MARGIN - 16) / max(end - begin, 1e-9), _TOP + num_workers * _ROW
    canvas = Image.new("RGB", (_WIDTH, bottom + _BOTTOM), _WHITE)
    draw = ImageDraw.Draw(canvas)
    draw.text((_WIDTH / 2, 16), title, _INK, font(14), anchor="mm")
    for tick in range(9):
        seconds = (end - begin) * tick / 8
        draw.line((_MARGIN + seconds * scale, _TOP - 4, _MARGIN + seconds * scale, bottom), _LINE)
        text = f"{seconds * 1000:.3g}{' ms' * (tick == 0)}"
        draw.text((_MARGIN + seconds * scale, bottom + 9), text, _INK, font(12), anchor="mm")
    for worker in range(num_workers):
        top = _TOP + worker * _ROW
        draw.text((_MARGIN - 10, top + _BAR / 2), f"worker {worker}", _INK, font(13), anchor="rm")
        draw.rectangle((_MARGIN, top, _MARGIN + (end - begin) * scale, top + _BAR), _IDLE)
    for stage, kind, micro, start, stop in sorted(spans, key=lambda span: span.start):
        left, right = (_MARGIN + (moment - begin) * scale for moment in (start, stop))
        top, color = _TOP + stage % num_workers * _ROW, COLORS[kind][stage >= num_workers]
        draw.rectangle((left, top, max(left + 1, right), top + _BAR), color, outline=_WHITE)
        if font(12).getlength(str(micro)) + 4 < right - left:
            draw.text(((left + right) / 2, top + _BAR / 2), str(micro), _WHITE, font(12), anchor="mm")

    x, y = float(_MARGIN), canvas.height - 14
    legend = [(COLORS[kind][0], kind) for kind in COLORS if any(span.kind == kind for span in spans)]
    for color, name in (*legend, (_IDLE, "idle")):
        draw.rectangle((x, y - 6, x + 12, y + 6), color)
        draw.text((x + 18, y), name, _INK, font(12), anchor="lm")
        x += 36 + font(12).getlength(name)
    return to_tensor(canvas)
