"""The log of a run: a file in full, the console in short."""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from pathlib import Path


class _Console(logging.Handler):
    """To the current `sys.stderr`, which a progress bar may have replaced."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr, flush=True)


class _File(logging.FileHandler):
    """To a file; what a full disk does not take is on the console anyway."""

    def handleError(self, record: logging.LogRecord) -> None:
        pass

    def close(self) -> None:
        with suppress(OSError):
            super().close()


class LogFile:
    """A context in which the project's log goes to a file in full and, on rank 0, to the console from INFO up.

    Args:
        directory: the run's; rank 0 writes `log.txt`, rank 1 `log_rank_1.txt`.
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
