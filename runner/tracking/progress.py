"""Progress displays: a bar on a terminal, otherwise a line every few seconds."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress


class Progress:
    """A progress display that prints a line to standard error every `interval` seconds: not on a terminal, and in CI.

    `first_step` is the number of the `num_steps` that were completed before the run was resumed. On ranks other than 0,
    for which `visible` is False, nothing is displayed. The time left is known after two steps, and computed without the
    first of them, which may compile the network.
    """

    interval = 5.0

    def __init__(self, num_steps: int, first_step: int = 0, visible: bool = True):
        self.num_steps, self._visible = num_steps, visible
        self._metrics: dict[str, tuple[float, int]] = {}
        self._begin: tuple[float, int] | None = None
        self._shown_at = time.perf_counter()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the terminal."""

    def metrics(self, values: dict[str, float], step: int) -> None:
        """Set the metrics to show, by tag, as of `step`; metrics that are not in `values` keep their last values."""
        self._metrics.update({tag: (value, step) for tag, value in values.items()})

    def step(self, step: int) -> None:
        """Report that `step` is done."""
        now = time.perf_counter()
        self._begin = self._begin or (now, step)
        if self._visible and (now - self._shown_at >= self.interval or step == self.num_steps):
            self._shown_at = now
            with suppress(OSError):  # a terminal that was closed, or a full disk: the run goes on
                self.show(step)

    def show(self, step: int) -> None:
        """Display the progress after `step`."""
        print("  ".join(self.parts(step)), file=sys.stderr, flush=True)

    def parts(self, step: int) -> list[str]:
        """Return the step, the time left with evaluations and checkpoints, and what was logged last, and at which step.

        The more important parts come first: metrics of training, of the evaluation, throughput.
        """
        (began, first), parts, at = self._begin or (0.0, step), [f"step {step}/{self.num_steps}"], step
        if first < step or step == self.num_steps:
            per_step = (self._shown_at - began) / max(1, step - first)
            parts.append(f"{_clock((self.num_steps - step) * per_step)} left")
        for tag, (value, logged) in sorted(self._metrics.items(), key=lambda item: item[0].startswith("eval/")):
            if tag.count("/") < 2 and not tag.startswith("time/"):
                text = f"{tag.removeprefix('train/')} {value:.4g}"
                parts.append(text if logged == at else f"at {logged}: {text}")
                at = logged
        rate, _ = self._metrics.get("time/samples_per_second", (0, 0))
        return parts + [f"{rate:,.0f} samples/s"] * bool(rate)


class Bar(Progress):
    """A progress bar, drawn with rich. The training loop, not a separate thread, redraws it a few times per second."""

    interval = 0.25

    def __init__(self, num_steps: int, first_step: int = 0, visible: bool = True):
        super().__init__(num_steps, first_step, visible)
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as RichProgress

        # Messages are not wrapped, so that the paths in them can be copied.
        self._console = Console(stderr=True, soft_wrap=True)
        self._bar_width = min(30, self._console.width // 8)
        columns = BarColumn(self._bar_width), TextColumn("{task.fields[text]}", markup=False)
        self._bar = RichProgress(*columns, console=self._console, auto_refresh=False)
        self._task = self._bar.add_task(
            "", total=num_steps, completed=first_step, text=f"step {first_step}/{num_steps}"
        )
        self._bar.start()

    def show(self, step: int) -> None:
        parts, room = self.parts(step), self._console.width - self._bar_width - 1
        while len("  ".join(parts)) > room and len(parts) > 1:  # metrics give way
            parts.pop()
        self._bar.update(self._task, completed=step, text="  ".join(parts), refresh=True)

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
