"""Progress displays: a bar on a terminal, otherwise a line every few seconds."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress


class Progress:
    """A progress display that prints a line to standard error every `interval` seconds: not on a terminal, and in CI.

    `first_step` is the number of the `num_steps` that were completed before the run was resumed. On ranks other than 0,
    for which `visible` is False, nothing is displayed.
    """

    interval = 5.0

    def __init__(self, num_steps: int, first_step: int = 0, visible: bool = True):
        self.num_steps, self._first_step, self._visible = num_steps, first_step, visible
        self._metrics: dict[str, float] = {}
        self._began = self._shown_at = time.perf_counter()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the terminal."""

    def metrics(self, values: dict[str, float]) -> None:
        """Set the metrics to show, by tag; metrics that are not in `values` keep their last values."""
        self._metrics.update(values)

    def step(self, step: int) -> None:
        """Report that `step` is done."""
        now = time.perf_counter()
        if self._visible and (now - self._shown_at >= self.interval or step == self.num_steps):
            self._shown_at = now
            with suppress(OSError):  # a terminal that was closed, or a full disk: the run goes on
                self.show(step)

    def show(self, step: int) -> None:
        """Display the progress after `step`."""
        print(f"step {step}/{self.num_steps}  {self.summary(step)}", file=sys.stderr, flush=True)

    def summary(self, step: int) -> str:
        """Return the metrics, the throughput at the last log, and the time left, with evaluations and checkpoints."""
        metrics = {tag: value for tag, value in self._metrics.items() if tag.count("/") < 2}
        parts = [f"{tag.removeprefix('train/')} {metrics[tag]:.4g}" for tag in metrics if not tag.startswith("time/")]
        if rate := metrics.get("time/samples_per_second"):
            parts.append(f"{rate:,.0f} samples/s")
        per_step = (self._shown_at - self._began) / (step - self._first_step)
        return "  ".join([*parts, f"{_clock((self.num_steps - step) * per_step)} left"])


class Bar(Progress):
    """A progress bar, drawn with rich. The training loop, not a separate thread, redraws it a few times per second."""

    interval = 0.25

    def __init__(self, num_steps: int, first_step: int = 0, visible: bool = True):
        super().__init__(num_steps, first_step, visible)
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as RichProgress

        columns = (BarColumn(bar_width=30), MofNCompleteColumn(), TextColumn("{task.fields[summary]}"))
        self._bar = RichProgress(*columns, console=Console(stderr=True), auto_refresh=False)
        self._task = self._bar.add_task("", total=num_steps, completed=first_step, summary="")
        self._bar.start()

    def show(self, step: int) -> None:
        self._bar.update(self._task, completed=step, summary=self.summary(step), refresh=True)

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # a terminal that was closed must not hide the error that ends the run
            self._bar.stop()


def progress_for(num_steps: int, first_step: int, visible: bool) -> Progress:
    """Return a bar on a terminal, lines in files, in pipes and in CI, and nothing on ranks that are not `visible`."""
    terminal = sys.stderr and sys.stderr.isatty() and not os.environ.get("CI") and os.environ.get("TERM") != "dumb"
    return (Bar if terminal and visible else Progress)(num_steps, first_step, visible)


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
