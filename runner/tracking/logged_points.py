"""The points that a remote tracker has already logged, so that a resumed run does not log them again.

A run that is resumed repeats the steps after its last checkpoint, with the same results. Points in a remote database
cannot be removed. Therefore, a file in the run directory lists the points that were logged since the second-last
checkpoint, from which a run is resumed if the last one is damaged or incomplete.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import numpy

from runner.storage.files import read_regular, write_text

T = TypeVar("T", float, numpy.ndarray)

_LIMIT_BYTES = 100_000_000
"""The maximum size of the file: two million points."""

_MEASURED = ("time/", "memory/")
"""Prefixes of the tags of measurements. Their values differ when a step is repeated, so they are not compared."""


class LoggedPoints:
    """A text file with a line `step tag value` for each point since the second-last checkpoint.

    Args:
        path: the file. An incomplete last line is ignored; a run that was killed may have left one.
        first_step: the first step of the session. Points of earlier steps are removed from the file, because the
            session does not repeat these steps.

    Raises:
        OSError: if the file cannot be read or written, or is too large. `add` and `begin_interval` also raise this
            error.
    """

    def __init__(self, path: Path, first_step: int):
        self._path = path
        text = read_regular(path, _LIMIT_BYTES).decode(errors="replace") if path.exists() else ""
        lines = [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
        self._earlier = [line for line in lines if _step_of(line) >= first_step]
        self._repeated = set(self._earlier)
        self._added: list[str] = []
        self._step = self._boundary = first_step - 1
        write_text(path, "".join(self._earlier))

    def new(self, values: Mapping[str, T], step: int) -> dict[str, T]:
        """Return the entries of `values` that still have to be logged at `step`.

        An entry is left out if, according to the file, an earlier session logged the same tag and value at the same
        step. For measurements such as times (see `_MEASURED`), the values are not compared.

        Args:
            values: scalars or images by tag.
            step: the number of completed optimizer steps. `begin_interval` assumes that the next checkpoint is saved
                at the largest step that was passed to this method.
        """
        self._step = max(self._step, step)
        if not self._repeated:
            return dict(values)
        return {tag: value for tag, value in values.items() if _line(tag, value, step) not in self._repeated}

    def add(self, values: Mapping[str, float] | Mapping[str, numpy.ndarray], step: int) -> None:
        """Record that `values` were logged at `step`."""
        lines = [_line(tag, value, step) for tag, value in values.items()]
        self._added += lines
        with self._path.open("a", encoding="utf-8") as file:  # closed each time: a run can be killed at any time
            file.writelines(lines)

    def begin_interval(self) -> None:
        """Remove old points from the file. This must be called before each checkpoint is saved.

        The checkpoint that was saved after the previous call is complete by now, so no resumed run repeats the steps up
        to it. Points of later steps are kept, also those of earlier sessions.
        """
        self._earlier = [line for line in self._earlier if _step_of(line) > self._boundary]
        write_text(self._path, "".join([*self._earlier, *self._added]))
        self._added, self._boundary = [], self._step


def _line(tag: str, value: float | numpy.ndarray, step: int) -> str:
    if isinstance(value, numpy.ndarray):
        value = zlib.crc32(value.tobytes())
    return f"{step} {tag} {'measured' if tag.startswith(_MEASURED) else repr(value)}\n"


def _step_of(line: str) -> int:
    step = line.partition(" ")[0]
    return int(step) if step.isdecimal() and len(step) < 20 else -1
