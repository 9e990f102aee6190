"""Reads the scalars of a run from its event files, which may be damaged or written by somebody else."""

from __future__ import annotations

import itertools
import logging
import os
from collections import Counter
from collections.abc import Container, Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any

from runner.config.errors import escaped
from runner.storage.regular_file import open_regular
from runner.system.utf8 import printable

log = logging.getLogger(__name__)

_LIMIT_BYTES = 200_000_000
"""The maximum total size of the events that are read of one run, in bytes. Events that are skipped do not count."""
_LIMIT_RECORD_BYTES = 10_000
"""The maximum size of an event with scalars, in bytes. Events with images and texts are larger, and are skipped."""
_BATCH = 200
"""The number of events whose checksums are computed at once. 200 is fastest for events of a few hundred bytes."""

_MOST_EVENTS = 2_000_000
"""The maximum number of events that are read from the files of one run. Reading so many takes about ten seconds."""
_MOST_TAGS = 1000
_MOST_POINTS = 2_000_000
"""The maximum number of points that are kept of one run. They take about 200 MB."""


def scalars(directory: Path, tags: Container[str] | None = None) -> dict[str, dict[int, float]]:
    """Return the scalars of a run: for each tag, a dict from steps to values, in the order of the steps.

    If a resumed session repeats steps of an earlier session, the values of the resumed session are returned. Values
    that are not finite, or whose absolute value is 1e30 or more, are left out. The event files may be damaged or
    written by somebody else: each file is read up to its first damaged event.

    If a run has too many points, every second point of the longest curves is left out, repeatedly if necessary. If it
    has too many curves, only the first ones are returned. If it has too many events, only the first ones are read. In
    each of these cases, a warning is logged.

    Args:
        directory: a run directory.
        tags: the TensorBoard tags to read; None for all. Tags without values are missing from the result.
    """
    curves = _Curves(tags)
    _read(sorted(directory.glob("events.out.tfevents.*")), curves)
    for what in curves.left_out:
        log.warning("%s: %s", escaped(printable(str(directory))), what)
    return {tag: values for tag, values in curves.values.items() if values}


class _Curves:
    """The curves of a run, to which points are added while the event files are read.

    Args:
        tags: the tags to keep; None for all.
    """

    def __init__(self, tags: Container[str] | None):
        self._tags, self._num_points, self._read = tags, 0, Counter[str]()
        self._every: dict[str, int] = {}  # 2: every second point of this curve is kept
        self.values: dict[str, dict[int, float]] = {}
        self.left_out: dict[str, None] = {}  # what is not shown, in words: each once, in order

    def start_session(self, first_step: int) -> None:
        """Drop the points from `first_step` on, which the new session logs once more."""
        for values in self.values.values():
            while values and next(reversed(values)) >= first_step:  # the steps of a session are in order
                values.popitem()

    def add(self, tag: str, step: int, value: float) -> None:
        if self._tags is not None and tag not in self._tags:
            return
        if tag not in self.values:
            if len(self.values) == _MOST_TAGS:
                self.left_out[f"it has more than {_MOST_TAGS:,} curves; the others are left out"] = None
                return
            self.values[tag], self._every[tag] = {}, 1
        self._read[tag] += 1
        if (self._read[tag] - 1) % self._every[tag] == 0:
            self.values[tag][step] = value
            self._num_points += 1
            if self._num_points > _MOST_POINTS:
                self._thin_out()

    def _thin_out(self) -> None:
        self._num_points = sum(map(len, self.values.values()))  # fewer, if points were replaced or dropped
        if self._num_points <= _MOST_POINTS:
            return
        longest = max(map(len, self.values.values()))
        for tag, values in self.values.items():
            if len(values) > longest / 2:
                self.values[tag] = dict(itertools.islice(values.items(), None, None, 2))
                self._every[tag] *= 2
        self._num_points = sum(map(len, self.values.values()))
        self.left_out[f"it has more than {_MOST_POINTS:,} points; some of the longest curves are left out"] = None


def _read(paths: list[Path], curves: _Curves) -> None:
    """Add the scalars in event files to `curves`."""
    from tensorboard.compat.proto.event_pb2 import SessionLog  # pyright: ignore[reportAttributeAccessIssue]

    events, num_bytes = 0, 0
    for event, size in itertools.chain.from_iterable(map(_events, paths)):
        events, num_bytes = events + 1, num_bytes + size
        if events > _MOST_EVENTS or num_bytes > _LIMIT_BYTES:
            last = max((next(reversed(values)) for values in curves.values.values() if values), default=0)
            curves.left_out[f"it has more events than are read: its curves end at step {last:,}"] = None
            return
        if event.session_log.status == SessionLog.START:
            curves.start_session(event.step)
            events += len(curves.values)  # takes as long as that many events
        for each in event.summary.value:
            if each.HasField("simple_value") and abs(each.simple_value) < 1e30:
                curves.add(each.tag, event.step, each.simple_value)


def _events(path: Path) -> Iterator[tuple[Any, int]]:
    """Yield each event of an event file and the size of the event in bytes, up to the first damaged event."""
    from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]

    try:
        for record in _records(path):
            yield Event.FromString(record), len(record)
    except Exception as error:  # a damaged file may raise anything
        log.debug("%s cannot be read further: %s", path, error)


def _records(path: Path) -> Iterator[bytes]:
    """Yield the records of an event file, but skip records that are so long that they must contain images or texts.

    TensorBoard's own reader is not used: it is slow for images, because it computes checksums byte by byte in Python.

    Raises:
        ValueError: if a record is damaged.
        OSError: if the file cannot be read, or is a link or a pipe.
    """
    from runner.tracking.event_records import crc32cs, masked  # imported here, because it imports tensorboard

    with open_regular(path) as file:
        stored = _stored(file)
        while batch := list(itertools.islice(stored, _BATCH)):
            for (record, checksum), computed in zip(batch, crc32cs([record for record, _ in batch]), strict=True):
                if masked(computed) != checksum:
                    raise ValueError(f"a record of {path} is damaged")
                yield record


def _stored(file: BufferedReader) -> Iterator[tuple[bytes, bytes]]:
    """Yield each record that is not too long, and its checksum."""
    while len(head := file.read(12)) == 12:  # the length, and its checksum
        length = int.from_bytes(head[:8], "little")
        if length > _LIMIT_RECORD_BYTES:
            file.seek(length + 4, os.SEEK_CUR)
        else:
            yield file.read(length), file.read(4)
