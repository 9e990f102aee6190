"""Tracking with a CSV file (`tracking=csv`) in the run directory."""

from __future__ import annotations

import csv
import errno
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from runner.config.errors import check
from runner.storage.files import UnsafeFileError, open_regular
from runner.tracking.base import Tracker

log = logging.getLogger(__name__)

_HEADER = ["step", "tag", "value"]
_LIMIT_BYTES = 4_000_000_000
"""The maximum size of a file that a resumed run continues, in bytes: about a hundred curves of a million points."""
_LIMIT_LINE_BYTES = 10_000


@dataclass
class CsvFile(Tracker):
    """A tracker that appends a line `step,tag,value` for each point of a curve; texts and images are not written.

    A resumed run first removes the lines of the steps that it will repeat. If the file cannot be written, or a resumed
    run cannot read it, one warning is logged, and the run goes on, but adds no more lines.
    """

    file: str = "curves.csv"

    def __post_init__(self) -> None:
        plain = self.file.endswith(".csv") and "/" not in self.file and self.file.isprintable()
        check(plain, "file", self.file, "it must be the name of a CSV file", "as in tracking.file=curves.csv")

    def open(self, directory: Path, first_step: int) -> None:
        self._path, self._out = directory / self.file, None
        with self._given_up_on_errors():
            part = self._path.with_name(f"{self.file}.part")
            with part.open("w", newline="", encoding="utf-8") as out:
                csv.writer(out).writerow(_HEADER)
                csv.writer(out).writerows(_rows_before(first_step, self._path))
            os.replace(part, self._path)
            self._out = self._path.open("a", newline="", encoding="utf-8")

    def scalars(self, values: dict[str, float], step: int) -> None:
        if self._out is not None:
            with self._given_up_on_errors():
                csv.writer(self._out).writerows([step, tag, value] for tag, value in values.items())
                self._out.flush()  # a run can be killed at any time

    def flush(self) -> None:
        if self._out is not None:
            with self._given_up_on_errors():
                os.fsync(self._out.fileno())

    def close(self, done: bool) -> None:
        if self._out is not None:
            self._out.close()

    @contextmanager
    def _given_up_on_errors(self) -> Iterator[None]:
        """Write nothing more after an `OSError` in the context."""
        try:
            yield
        except OSError as error:
            what = f"{self._path} cannot be written or continued ({error.strerror})"
            log.warning("%s: later curves will be missing from it; the run goes on", what)
            out, self._out = self._out, None
            with suppress(OSError):
                if out is not None:
                    out.close()


def _rows_before(first_step: int, path: Path) -> Iterator[list[str]]:
    """Yield the rows for steps before `first_step`, without damaged lines: a crash may have left an incomplete one.

    Raises:
        OSError: if the file cannot be read, is a link or a pipe, or is too large.
    """
    try:
        file = open_regular(path)
    except FileNotFoundError:
        return
    with file:
        if os.fstat(file.fileno()).st_size > _LIMIT_BYTES:
            raise UnsafeFileError(errno.EFBIG, f"it has more than {_LIMIT_BYTES:,} bytes", str(path))
        while line := file.readline(_LIMIT_LINE_BYTES):
            row = _row(line)
            if row and int(row[0]) < first_step:
                yield row


def _row(line: bytes) -> list[str] | None:
    """Return the cells of `line`, or None if the line is damaged or is the header."""
    step = line.partition(b",")[0]
    if not (line.endswith(b"\n") and step.isdigit() and len(step) < 20):
        return None
    try:
        [row] = csv.reader([line.decode()])
    except (csv.Error, UnicodeDecodeError):
        return None
    return row if len(row) == len(_HEADER) else None
