"""Tracking with a CSV file (`tracking=csv`) in the run directory."""

from __future__ import annotations

import csv
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.config.errors import check
from runner.tracking.base import Tracker

log = logging.getLogger(__name__)

_HEADER = ["step", "tag", "value"]


@dataclass
class CsvFile(Tracker):
    """A tracker that appends a line `step,tag,value` for each point of a curve; texts and images are not written.

    If the file cannot be written, one warning says so, and the run goes on.

    Args:
        file: name of the file in the run directory.
    """

    file: str = "curves.csv"

    def __post_init__(self) -> None:
        plain = self.file.endswith(".csv") and "/" not in self.file and self.file.isprintable()
        check(plain, "file", self.file, "it must be the name of a CSV file", "as in tracking.file=curves.csv")

    def open(self, directory: Path, first_step: int) -> None:
        self._path, self._out = directory / self.file, None
        try:
            # Points of first_step and later are logged once more. A crash may have left an incomplete last line.
            lines = self._path.read_text(encoding="utf-8").splitlines(keepends=True) if self._path.exists() else []
            rows = [row for row in csv.reader(line for line in lines if line.endswith("\n")) if len(row) == 3]
            kept = [row for row in rows if row[0].isdigit() and int(row[0]) < first_step]
            part = self._path.with_name(f"{self.file}.part")
            with part.open("w", newline="", encoding="utf-8") as out:
                csv.writer(out).writerows([_HEADER, *kept])
            os.replace(part, self._path)
            self._out = self._path.open("a", newline="", encoding="utf-8")
        except OSError as error:
            self._give_up(error)

    def scalars(self, values: dict[str, float], step: int) -> None:
        self._write([[step, tag, value] for tag, value in values.items()])

    def flush(self) -> None:
        if self._out is not None:
            try:
                os.fsync(self._out.fileno())
            except OSError as error:
                self._give_up(error)

    def close(self, done: bool) -> None:
        if self._out is not None:
            self._out.close()

    def _write(self, rows: list[list[Any]]) -> None:
        if self._out is not None:
            try:
                csv.writer(self._out).writerows(rows)
                self._out.flush()  # a run can be killed at any time
            except OSError as error:
                self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """Write nothing more, because of `error`."""
        log.warning("%s cannot be written (%s): curves are missing in it; the run goes on", self._path, error.strerror)
        out, self._out = self._out, None
        if out is not None:
            try:
                out.close()
            except OSError:
                log.debug("%s cannot be closed either", self._path)
