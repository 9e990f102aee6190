"""Logging of a run: everything to a file, INFO and above to the console."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from logging.handlers import MemoryHandler
from pathlib import Path

from runner.system.secrets import printable, redacted


class _Formatter(logging.Formatter):
    """A formatter that masks secrets, including secrets in tracebacks."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(redacted(super().format(record)))


class _Console(logging.Handler):
    """A handler that writes to the current `sys.stderr`, which a progress bar may have replaced, if it can."""

    def emit(self, record: logging.LogRecord) -> None:
        _print(self.format(record))


class _File(logging.FileHandler):
    """A handler that writes to a file. If writing fails, the handler prints one warning, and the run continues."""

    _failed = False

    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except OSError:  # raised when the file is opened; all other errors are handled by `emit`
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:
        if not self._failed:
            self._failed, error = True, sys.exc_info()[1]
            why = f"{self.baseFilename} cannot be written ({getattr(error, 'strerror', None) or error})"
            _print(printable(f"{why}: later messages will be missing from it; the run goes on"))

    def close(self) -> None:
        with suppress(OSError):  # `emit` has reported it
            super().close()


class LogFile:
    """A context manager that writes this project's log messages to a file and to the console, with credentials masked.

    The file gets all levels, and also Python warnings, which are then not shown on the console. The console gets level
    INFO and above on rank 0, and only CRITICAL on other ranks.

    Args:
        directory: the run directory; rank 0 writes the file `log.txt` in it, rank 1 the file `log_rank_1.txt`. None if
            it is not known yet; messages are then kept, and written to the file when `open` is called.
        rank: the rank of this process.
    """

    def __init__(self, directory: Path | None, rank: int = 0):
        self._name = f"log_rank_{rank}.txt" if rank else "log.txt"
        self._kept = MemoryHandler(capacity=0)  # passes each message on at once, if it has a target
        self._console = _Console(logging.INFO if rank == 0 else logging.CRITICAL)
        self._console.setFormatter(_Formatter())
        self._logger = logging.getLogger("runner")
        if directory is not None:
            self.open(directory)

    def open(self, directory: Path) -> None:
        """Write the messages so far, and all later ones, to the file in the run directory `directory`."""
        file = _File(directory / self._name, encoding="utf-8", delay=True)
        file.setFormatter(_Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        self._kept.setTarget(file)
        self._kept.flush()

    def __enter__(self) -> LogFile:
        self._before = self._logger.level, self._logger.propagate
        self._logger.setLevel(logging.DEBUG)
        self._logger.propagate = False
        for handler in (self._kept, self._console):
            self._logger.addHandler(handler)
        logging.captureWarnings(True)
        logging.getLogger("py.warnings").addHandler(self._kept)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("py.warnings").removeHandler(self._kept)
        logging.captureWarnings(False)
        for handler in (self._kept, self._console):
            self._logger.removeHandler(handler)
        level, self._logger.propagate = self._before  # the next run, and the caller's own program, log as before
        self._logger.setLevel(level)
        file = self._kept.target
        self._kept.close()
        if file is not None:
            file.close()


def _print(text: str) -> None:
    with suppress(OSError, ValueError):  # ValueError: the stream was closed
        print(text, file=sys.stderr, flush=True)


@contextmanager
def quiet(level: int = logging.WARNING) -> Iterator[None]:
    """Suppress messages up to `level` in the context: of what is only planned, or is done again."""
    before = logging.root.manager.disable
    logging.disable(max(before, level))
    try:
        yield
    finally:
        logging.disable(before)
