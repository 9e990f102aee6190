"""What a run leaves to look at: TensorBoard events, and the log."""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.utils.tensorboard.summary import image, text

from runner.events import EventFile, animation, points, row_end, row_start
from runner.pictures import gif


class Record:
    """TensorBoard's events of one session, in the run's own directory; writes nothing off rank 0.

    Args:
        directory: the run's.
        after_step: the step that was resumed from; what was logged of later ones is purged, so that none shows twice.
    """

    def __init__(self, directory: Path, after_step: int, visible: bool = True):
        self._first_step = after_step + 1
        self._directory = directory
        self._file = EventFile(directory, self._first_step) if visible else None

    def __enter__(self) -> Record:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def scalars(self, values: dict[str, Any], step: int) -> None:
        """Log numbers by tag; x is the number of optimizer steps."""
        if self._file is not None:
            self._file.add(points({tag: float(value) for tag, value in values.items()}), step)

    def pictures(self, pictures: dict[str, torch.Tensor], step: int) -> None:
        """Log RGB images, uint8 [3, height, width], by tag; a film, [frames, 3, height, width], is also a GIF."""
        if self._file is not None:
            for tag, picture in pictures.items():
                if picture.ndim == 3:
                    self._file.add(image(tag, picture, dataformats="CHW"), step)
                    continue
                film = gif(picture)
                (self._directory / f"{tag.rpartition('/')[2]}.gif").write_bytes(film)
                self._file.add(animation(tag, film, picture.shape[2], picture.shape[3]), step)

    def texts(self, texts: dict[str, str]) -> None:
        """Log preformatted texts by tag; x is the session's first step, from which on they hold."""
        if self._file is not None:
            for tag, content in texts.items():
                self._file.add(text(tag, f"```\n{content}\n```"), self._first_step)

    def open_row(self, config: dict[str, Any]) -> None:
        """This run's row in the HPARAMS tab; its metrics are what is logged as scalars.

        In the run's own file: `SummaryWriter.add_hparams` makes a run of its own, whose metrics do not show.
        """
        if self._file is not None:
            self._file.add(row_start({key: value for key, value in flatten(config).items() if value is not None}))

    def close_row(self) -> None:
        """Say in the HPARAMS tab that the run came to its end."""
        if self._file is not None:
            self._file.add(row_end())

    def sync(self) -> None:
        """Everything logged so far is on the disk: before a checkpoint, whose resume does not log it again."""
        if self._file is not None:
            self._file.sync()


def flatten(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The leaves of a nested config by dotted key; lists as text, and of a component's class its bare name."""
    leaves: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            leaves |= flatten(value, f"{prefix}{key}.")
        elif key == "_target_":
            leaves[prefix.rstrip(".")] = value.rpartition(".")[2]
        else:
            leaves[prefix + key] = value if isinstance(value, int | float | str | None) else str(value)
    return leaves


class _Console(logging.Handler):
    """To standard error as it is now: a progress bar puts itself in between."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr, flush=True)


class _File(logging.FileHandler):
    """To a file, as long as the disk takes it; the console has the same."""

    def handleError(self, record: logging.LogRecord) -> None:
        pass

    def close(self) -> None:
        with suppress(OSError):
            super().close()


class LogFile:
    """A context in which the project's log goes to a file in full, and from rank 0 to the console in short.

    Entered again within itself it does nothing more.

    Args:
        directory: the run's; rank 0 writes `log.txt`, rank 1 `log_rank_1.txt`.
    """

    def __init__(self, directory: Path, rank: int = 0):
        name = f"log_rank_{rank}.txt" if rank else "log.txt"
        self._file = _File(directory / name, encoding="utf-8", delay=True)
        self._file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        self._console = _Console(logging.INFO if rank == 0 else logging.CRITICAL)
        self._logger = logging.getLogger("runner")
        self._is_outer = not any(isinstance(handler, _File) for handler in self._logger.handlers)

    def __enter__(self) -> None:
        if not self._is_outer:
            return
        self._logger.setLevel(logging.DEBUG)
        self._logger.propagate = False
        for handler in (self._file, self._console):
            self._logger.addHandler(handler)
        logging.captureWarnings(True)
        logging.getLogger("py.warnings").addHandler(self._file)

    def __exit__(self, *_: object) -> None:
        if not self._is_outer:
            return
        logging.getLogger("py.warnings").removeHandler(self._file)
        logging.captureWarnings(False)
        for handler in (self._file, self._console):
            self._logger.removeHandler(handler)
        self._logger.propagate = True
        self._file.close()
