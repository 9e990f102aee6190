"""Logging of a run: everything to a file, INFO and above to the console."""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from pathlib import Path


class _Console(logging.Handler):
    """Writes to the current `sys.stderr`, which a progress bar may have replaced."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr, flush=True)


class _File(logging.FileHandler):
    """Writes to a file, and ignores a full disk: the console shows the important messages."""

    def handleError(self, record: logging.LogRecord) -> None:
        pass

    def close(self) -> None:
        with suppress(OSError):
            super().close()


class LogFile:
    """A context manager that sends all log messages to a file and, on rank 0, those from INFO up to the console.

    Args:
        directory: the run directory; rank 0 writes `log.txt`, rank 1 `log_rank_1.txt`.
        rank: the rank of this process.
    """

    def __init__(self, directory: Path, rank: int = 0):
        name = f"log_rank_{rank}.txt" if rank else "log.txt"
        self._file = _File(directory / name, encoding="utf-8", delay=True)
        self._file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        self._console = _Console(logging.INFO if rank == 0 else logging.CRITICAL)
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
