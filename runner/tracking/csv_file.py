"""Tracking with a CSV file (`tracking=csv`) in the run directory."""

from __future__ import annotations

import csv
import io
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from runner.storage.files import read_regular
from runner.storage.run_directory import storage_errors
from runner.tracking.base import Tracker

MAX_BYTES = 500_000_000
"""The maximum size of a file that a resumed run continues, in bytes: about a hundred curves of 100,000 points."""


@dataclass
class CsvFile(Tracker):
    """A tracker that appends a line `step,tag,value` to `curves.csv` for each point; texts and images are not written.

    A resumed run first removes the lines of the steps that it will repeat.
    """

    def open(self, directory: Path, first_step: int) -> None:
        self._path, part = directory / "curves.csv", directory / "curves.csv.part"
        with storage_errors(self._path):
            saved = read_regular(self._path, MAX_BYTES) if os.path.lexists(self._path) else b""
            with part.open("wb") as out:
                out.write(b"step,tag,value\r\n")
                for line in io.BytesIO(saved):
                    step = line.partition(b",")[0]
                    if line.endswith(b"\n") and step.isdigit() and len(step) < 20 and int(step) < first_step:
                        out.write(line)
            os.replace(part, self._path)
            self._out = self._path.open("a", newline="", encoding="utf-8")

    def scalars(self, values: dict[str, float], step: int) -> None:
        with storage_errors(self._path):
            csv.writer(self._out).writerows([step, tag, value] for tag, value in values.items())
            self._out.flush()  # a run can be killed at any time

    def flush(self) -> None:
        with storage_errors(self._path):
            os.fsync(self._out.fileno())

    def close(self, status: str) -> None:
        with suppress(OSError):  # `scalars` has reported it
            self._out.close()
