"""What a person sees while a run goes on: a bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import os
import sys
import time


class Progress:
    """A line every `interval` seconds on standard error: for files, pipes and CI."""

    interval = 5.0

    def __init__(self, num_steps: int, batch_size: int, first_step: int = 0):
        self.num_steps, self.batch_size = num_steps, batch_size
        self._metrics: dict[str, float] = {}
        self._since, self._since_step = time.perf_counter(), first_step
        self._rate = 0.0

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def metrics(self, values: dict[str, float]) -> None:
        """Take over what was last measured, to be shown from now on."""
        self._metrics.update(values)

    def step(self, step: int) -> None:
        """Say that `step` is done: cheap enough for every step."""
        now = time.perf_counter()
        if now - self._since < self.interval and step < self.num_steps:
            return
        if step > self._since_step and now > self._since:
            self._rate = (step - self._since_step) / (now - self._since)
        self._since, self._since_step = now, step
        self.show(step)

    def show(self, step: int) -> None:
        """Show the state after `step`."""
        print(f"step {step}/{self.num_steps}  {self.summary(step)}", file=sys.stderr, flush=True)

    def summary(self, step: int) -> str:
        """Metrics, throughput and time left."""
        parts = [
            f"{name.removeprefix('train/')} {value:.4g}" for name, value in self._metrics.items() if name.count("/") < 2
        ]
        if self._rate:
            parts += [
                f"{self._rate * self.batch_size:,.0f} samples/s",
                f"{_clock((self.num_steps - step) / self._rate)} left",
            ]
        return "  ".join(parts)

    def close(self) -> None:
        """Leave the terminal as it was."""


class Bar(Progress):
    """A live bar (rich), redrawn a few times a second by the loop itself: no thread competes with it."""

    interval = 0.25

    def __init__(self, num_steps: int, batch_size: int, first_step: int = 0):
        super().__init__(num_steps, batch_size, first_step)
        from rich.console import Console  # here: 0.1 s that runs in the background do not need
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as RichProgress

        columns = (BarColumn(bar_width=30), MofNCompleteColumn(), TextColumn("{task.fields[summary]}"))
        self._bar = RichProgress(*columns, console=Console(stderr=True), auto_refresh=False)
        self._task = self._bar.add_task("", total=num_steps, completed=first_step, summary="")
        self._bar.start()

    def show(self, step: int) -> None:
        self._bar.update(self._task, completed=step, summary=self.summary(step), refresh=True)

    def close(self) -> None:
        self._bar.stop()


class Silent(Progress):
    """Nothing at all: every rank but the first."""

    def step(self, step: int) -> None:
        pass


def progress_for(num_steps: int, batch_size: int, first_step: int, visible: bool) -> Progress:
    """The progress display that suits where standard error goes. `CI` means a log file, whatever it looks like."""
    if not visible:
        return Silent(num_steps, batch_size, first_step)
    terminal = sys.stderr.isatty() and not os.environ.get("CI") and os.environ.get("TERM") != "dumb"
    return (Bar if terminal else Progress)(num_steps, batch_size, first_step)


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
