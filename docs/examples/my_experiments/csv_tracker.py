"""A tracking backend: curves as a CSV file in the run directory."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

from runner.config.errors import check
from runner.tracking.base import Tracker


@dataclass
class CsvTracker(Tracker):
    """Appends a line `step,tag,value` for each point of a curve.

    Args:
        file: name of the CSV file in the run directory.
    """

    file: str = "curves.csv"

    def __post_init__(self) -> None:
        plain = self.file.endswith(".csv") and "/" not in self.file
        check(plain, "file", self.file, "it must be the name of a CSV file", "as in tracking.file=curves.csv")

    def open(self, directory: Path, first_step: int) -> None:
        path = directory / self.file
        rows = list(csv.reader(path.open(newline="", encoding="utf-8"))) if path.exists() else []
        # Points of first_step and later were logged after the checkpoint that is resumed: they are logged once more.
        kept = [row for row in rows if int(row[0]) < first_step]
        self._out = path.open("w", newline="", encoding="utf-8")
        self._write(kept)

    def scalars(self, values: dict[str, float], step: int) -> None:
        self._write([[step, tag, value] for tag, value in values.items()])

    def close(self, status: str) -> None:
        self._out.close()

    def _write(self, rows: list[list]) -> None:
        csv.writer(self._out).writerows(rows)
        self._out.flush()  # a run can be killed at any time
