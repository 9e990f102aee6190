"""What a run leaves to look at: TensorBoard events, the log, `result.json`; and the window of sums between two logs."""

from __future__ import annotations

import logging
import math
import statistics
import sys
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.tensorboard.summary import hparams as hparams_summaries
from torch.utils.tensorboard.writer import SummaryWriter

from runner.clock import clock
from runner.workloads.base import Sums


class DivergedError(Exception):
    """The loss or the weights stopped being finite."""

    def __init__(self, step: int, what: str):
        super().__init__(f"{what} is not finite at step {step}")
        self.step, self.what = step, what


class Window:
    """The training sums of each step since the last log.

    They stay on the device, so that no step waits for it, until a log or a checkpoint is due.

    Args:
        rows: those of an earlier session, [num_metrics] each.
    """

    def __init__(self, rows: list[torch.Tensor] | None = None):
        self._rows = rows or []
        self._part: torch.Tensor | None = None

    def add(self, sums: torch.Tensor, is_last: bool) -> None:
        """Take the sums of a micro-batch, [num_metrics]; the last one completes the step's."""
        self._part = sums if self._part is None else self._part + sums
        if is_last:
            self._rows.append(self._part)
            self._part = None

    def peek(self, reduce: Callable[[Sums], Sums], last_step: int) -> torch.Tensor:
        """The sums of all ranks: float32 [num_steps, num_metrics], on the CPU.

        Raises:
            DivergedError: naming the first step whose loss is not finite.
        """
        if not self._rows:
            return torch.zeros(0)
        values = reduce({"train": torch.stack(self._rows)})["train"].cpu()
        finite = values[:, 0].isfinite()
        if not finite.all():
            first = int(finite.logical_not().nonzero()[0])
            raise DivergedError(last_step - len(values) + 1 + first, "the loss")
        return values

    def take(self, reduce: Callable[[Sums], Sums], last_step: int) -> torch.Tensor:
        """What `peek` gives; the window begins anew."""
        values = self.peek(reduce, last_step)
        self._rows = []
        return values


class Stopwatch:
    """How long steps take; logs, evaluations and checkpoints left out."""

    def __init__(self) -> None:
        self.seconds = array("d")
        self._logged = 0
        self.start()

    def start(self) -> None:
        """The first step begins now."""
        self._began = self._started = time.perf_counter()
        self._pauses = self._data = 0.0

    def lap(self) -> None:
        """A step is done."""
        now, pauses = time.perf_counter(), sum(map(clock.spent, ("log", "evaluate", "checkpoint")))
        self.seconds.append(now - self._started - (pauses - self._pauses))
        self._started, self._pauses = now, pauses

    def rates(self, batch_size: int) -> dict[str, float]:
        """Throughput, and the share of the time that the loop waited for data, since this was asked last."""
        recent, data = self.seconds[self._logged :], clock.spent("data")
        seconds, share = sum(recent), (data - self._data) / sum(recent)
        self._logged, self._data = len(self.seconds), data
        return {
            "time/samples_per_second": batch_size * len(recent) / seconds,
            "time/step_seconds": seconds / len(recent),
            "time/data_share": share,
        }

    def elapsed(self) -> float:
        """Seconds since the first step began."""
        return time.perf_counter() - self._began

    def steady(self) -> list[float]:
        """The steps without the warm-up: without the first ten, or a fifth of a short run."""
        return list(self.seconds[min(10, len(self.seconds) // 5) :])


class Record:
    """TensorBoard's events of one run, all in its own directory; writes nothing off rank 0.

    Args:
        directory: the run's.
        after_step: the step that was resumed from: events of later ones are purged, so that none shows twice.
    """

    def __init__(self, directory: Path, after_step: int, visible: bool = True):
        self._row_end: Any = None
        self._writer = SummaryWriter(str(directory), purge_step=after_step + 1) if visible else None

    def __enter__(self) -> Record:
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.close()

    def scalars(self, values: dict[str, Any], step: int) -> None:
        """Log numbers by tag; x is the number of optimizer steps."""
        if self._writer is not None:
            for tag, value in values.items():
                self._writer.add_scalar(tag, float(value), step)

    def pictures(self, pictures: dict[str, torch.Tensor], step: int) -> None:
        """Log RGB images, uint8 [3, height, width], by tag."""
        if self._writer is not None:
            for tag, picture in pictures.items():
                self._writer.add_image(tag, picture, step)

    def texts(self, texts: dict[str, str]) -> None:
        """Log preformatted texts by tag."""
        if self._writer is not None:
            for tag, text in texts.items():
                self._writer.add_text(tag, f"```\n{text}\n```", 0)

    def open_row(self, config: dict[str, Any], metrics: list[str]) -> None:
        """This run's row in the HPARAMS tab, with `metrics`, by tag.

        Written into the run's own file: `SummaryWriter.add_hparams` makes a run of its own, whose metrics do not show.
        """
        values = {name: value for name, value in flatten(config).items() if value is not None}
        columns, row, self._row_end = hparams_summaries(values, dict.fromkeys(metrics, 0.0))
        self._add(columns, row)

    def close_row(self) -> None:
        """Say in the HPARAMS tab that the run came to its end."""
        self._add(self._row_end)

    def _add(self, *summaries: Any) -> None:
        if self._writer is not None and (file := self._writer.file_writer) is not None:
            for summary in summaries:
                file.add_summary(summary)

    def flush(self) -> None:
        """Everything logged so far is in the file: before a checkpoint, so that a resume finds what came before it."""
        if self._writer is not None:
            self._writer.flush()


def flatten(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The leaves of a nested config by dotted key; lists as text."""
    leaves: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            leaves |= flatten(value, f"{prefix}{key}.")
        else:
            leaves[prefix + key] = value if isinstance(value, int | float | str | None) else str(value)
    return leaves


def quantiles(seconds: list[float]) -> dict[str, float]:
    """Median and 90 % quantile; empty without values."""
    if not seconds:
        return {}
    ordered = sorted(seconds)
    return {"median": statistics.median(ordered), "p90": ordered[math.ceil(0.9 * len(ordered)) - 1]}


class _Console(logging.Handler):
    """To standard error as it is now: a progress bar puts itself in between."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr, flush=True)


class LogFile:
    """A context in which the project's log goes to `log.txt` in full, and to the console in short."""

    def __init__(self, directory: Path):
        self._file = logging.FileHandler(directory / "log.txt", encoding="utf-8", delay=True)
        self._file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        self._console = _Console(logging.INFO)
        self._logger = logging.getLogger("runner")

    def __enter__(self) -> None:
        self._logger.setLevel(logging.DEBUG)
        self._logger.propagate = False
        for handler in (self._file, self._console):
            self._logger.addHandler(handler)
        logging.captureWarnings(True)
        logging.getLogger("py.warnings").addHandler(self._file)

    def __exit__(self, *_: object) -> None:
        logging.getLogger("py.warnings").removeHandler(self._file)
        logging.captureWarnings(False)
        for handler in (self._file, self._console):
            self._logger.removeHandler(handler)
        self._logger.propagate = True
        self._file.close()
