"""Progress displays: a bar on a terminal, otherwise a line every few seconds."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress

from runner.tracking.metrics import Measured


class Progress:
    """A progress display that prints a line to standard error every `interval` seconds: not on a terminal, and in CI.

    Args:
        num_steps: total number of optimizer steps of the run.
        batch_size: number of samples per step, over all ranks.
        first_step: number of steps that were completed before the run was resumed; 0 for a new run.
    """

    interval = 5.0

    def __init__(self, num_steps: int, batch_size: int, first_step: int = 0):
        self.num_steps, self.batch_size = num_steps, batch_size
        self._metrics: dict[str, float] = {}
        self._first_step, self._shown_at = first_step, time.perf_counter()
        self._measured = Measured(first_step, 0.0, 0.0)
        self._rate = 0.0

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def metrics(self, values: dict[str, float]) -> None:
        """Set the metrics to show, by tag; metrics that are not in `values` keep their last values."""
        self._metrics.update(values)

    def step(self, step: int, measured: Measured) -> None:
        """Report that `step` is done; `measured` is how long the steps of this session took, up to a recent one."""
        now = time.perf_counter()
        if now - self._shown_at < self.interval and step < self.num_steps:
            return
        training = measured.training - self._measured.training
        if training > 0:
            self._rate = (measured.step - self._measured.step) / training
        self._shown_at, self._measured = now, measured
        with suppress(OSError):  # a terminal that was closed, or a full disk: the run goes on
            self.show(step)

    def show(self, step: int) -> None:
        """Display the progress after `step`."""
        print(f"step {step}/{self.num_steps}  {self.summary(step)}", file=sys.stderr, flush=True)

    def summary(self, step: int) -> str:
        """Return the metrics, the throughput and the remaining time after `step`, as text.

        The throughput is that of the steps since the last display, without logs, evaluations and checkpoints; the
        remaining time is estimated with them.
        """
        parts = [
            f"{name.removeprefix('train/')} {value:.4g}" for name, value in self._metrics.items() if name.count("/") < 2
        ]
        if self._rate:
            per_step = self._measured.elapsed / (self._measured.step - self._first_step)
            parts += [
                f"{self._rate * self.batch_size:,.0f} samples/s",
                f"{_clock((self.num_steps - step) * per_step)} left",
            ]
        return "  ".join(parts)

    def close(self) -> None:
        """Restore the terminal."""


class Bar(Progress):
    """A progress bar, drawn with rich. The training loop, not a separate thread, redraws it a few times per second."""

    interval = 0.25

    def __init__(self, num_steps: int, batch_size: int, first_step: int = 0):
        super().__init__(num_steps, batch_size, first_step)
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as RichProgress

        columns = (BarColumn(bar_width=30), MofNCompleteColumn(), TextColumn("{task.fields[summary]}"))
        self._bar = RichProgress(*columns, console=Console(stderr=True), auto_refresh=False)
        self._task = self._bar.add_task("", total=num_steps, completed=first_step, summary="")
        self._bar.start()

    def show(self, step: int) -> None:
        self._bar.update(self._task, completed=step, summary=self.summary(step), refresh=True)

    def close(self) -> None:
        with suppress(OSError):
            self._bar.stop()


class Silent(Progress):
    """A progress display that shows nothing, for ranks other than 0."""

    def show(self, step: int) -> None:
        pass


def progress_for(num_steps: int, batch_size: int, first_step: int, visible: bool) -> Progress:
    """Return a bar on a terminal, lines in files, in pipes and in CI, and nothing on ranks that are not `visible`."""
    if not visible:
        return Silent(num_steps, batch_size, first_step)
    terminal = sys.stderr and sys.stderr.isatty() and not os.environ.get("CI") and os.environ.get("TERM") != "dumb"
    return (Bar if terminal else Progress)(num_steps, batch_size, first_step)


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
