"""Tracking with a CSV file (`tracking=csv`) in the run directory."""

from __future__ import annotations

import csv
import errno
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from runner.storage.files import UnsafeFileError, open_regular
from runner.storage.run_directory import storage_errors
from runner.tracking.base import Tracker

_MAX_BYTES = 4_000_000_000
"""The maximum size of a file that a resumed run continues, in bytes: about a hundred curves of a million points."""
_MAX_LINE_BYTES = 10_000


@dataclass
class CsvFile(Tracker):
    """A tracker that appends a line `step,tag,value` to `curves.csv` for each point; texts and images are not written.

    A resumed run first removes the lines of the steps that it will repeat.
    """

    def open(self, directory: Path, first_step: int) -> None:
        self._path, part = directory / "curves.csv", directory / "curves.csv.part"
        with storage_errors(self._path):
            with part.open("wb") as out:
                out.write(b"step,tag,value\r\n")
                out.writelines(line for step, line in _lines_by_step(self._path) if step < first_step)
            os.replace(part, self._path)
            self._out = self._path.open("a", newline="", encoding="utf-8")

    def scalars(self, values: dict[str, float], step: int) -> None:
        with storage_errors(self._path):
            csv.writer(self._out).writerows([step, tag, value] for tag, value in values.items())
            self._out.flush()  # a run can be killed at any time

    def flush(self) -> None:
        with storage_errors(self._path):
            os.fsync(self._out.fileno())

    def close(self, done: bool) -> None:
        with suppress(OSError):  # `scalars` has reported it
            self._out.close()


def _lines_by_step(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the step and the content of each whole line `step,…` of `path`, which may be absent, or somebody else's."""
    if not os.path.lexists(path):
        return
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > _MAX_BYTES:
            raise UnsafeFileError(errno.EFBIG, f"it has more than {_MAX_BYTES:,} bytes", str(path))
        while line := file.readline(_MAX_LINE_BYTES):
            step = line.partition(b",")[0]
            if line.endswith(b"\n") and step.isdigit() and len(step) < 20:
                yield int(step), line
