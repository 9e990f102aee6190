"""Reads the scalars of a run from its event files, which may be damaged, or written by somebody else."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Container, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from runner.storage.files import open_regular
from runner.system.utf8 import printable

log = logging.getLogger(__name__)

MAX_POINTS = 3_000_000
"""The maximum number of events and points that are read of one run. They take about ten seconds and 400 MB."""
MAX_EVENT_BYTES = 1_000_000
"""The maximum size of an event with scalars. Larger events, which contain images, are skipped without being read."""


def scalars(directory: Path, tags: Container[str] | None = None) -> dict[str, dict[int, float]]:
    """Return the scalars of a run: for each tag, a dict from steps to values, in the order of the steps.

    If a resumed session repeats steps of an earlier session, the values of the resumed session are returned. Values
    that are not finite are left out. Each file is read up to its first damaged event. If there is more than can be
    read, a warning is logged.

    Args:
        directory: a run directory.
        tags: the TensorBoard tags to read; None for all. Tags without values are missing from the result.
    """
    curves = {
        tag: {step: value for step, value in values.items() if math.isfinite(value)}
        for tag, values in EventReader(directory, tags).read().items()
    }
    return {tag: values for tag, values in curves.items() if values}


class EventReader:
    """The scalars in the event files of a run, which may still be running.

    TensorBoard's own reader is not used: it computes the checksums of images byte by byte in Python.

    Args:
        directory: a run directory.
        tags: the TensorBoard tags to read; None for all.
    """

    def __init__(self, directory: Path, tags: Container[str] | None = None):
        self._directory, self._tags, self._left = directory, tags, MAX_POINTS
        self._curves: dict[str, dict[int, float]] = {}
        self._ends: dict[Path, int] = {}  # how many bytes of each file have been read

    def read(self) -> dict[str, dict[int, float]]:
        """Read what was written since the last call, and return all curves, as `scalars` does."""
        for path in sorted(self._directory.glob("events.out.tfevents.*")):
            for event in self._new_events(path):
                self._add(event)
                if self._left < 0:
                    last = max((step for values in self._curves.values() for step in values), default=0)
                    name = printable(str(self._directory))
                    log.warning("%s has more events than are read: its curves end at step %s", name, f"{last:,}")
                    return self._curves
        return self._curves

    def _add(self, event: Any) -> None:
        self._left -= 1 + len(event.summary.value)
        if event.session_log.status == event.session_log.START:  # a session that computes the later steps once more
            self._left -= len(self._curves)
            for values in self._curves.values():
                while values and next(reversed(values)) >= event.step:  # the steps of a session are in order
                    values.popitem()
        for each in event.summary.value:
            if each.HasField("simple_value") and (self._tags is None or each.tag in self._tags):
                self._curves.setdefault(each.tag, {})[event.step] = each.simple_value

    def _new_events(self, path: Path) -> Iterator[Any]:
        """Yield the events of a file that have not been read, up to one that is damaged or incomplete."""
        from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]

        from runner.tracking.event_file import masked_crc32c

        with suppress(Exception), open_regular(path) as file:  # a damaged file may raise anything
            file.seek(self._ends.get(path, 0))
            while len(head := file.read(12)) == 12:  # the length of the event, and its checksum
                length = int.from_bytes(head[:8], "little")
                if length > MAX_EVENT_BYTES:
                    file.seek(length + 4, os.SEEK_CUR)
                    continue
                data, checksum = file.read(length), file.read(4)
                if masked_crc32c(data) != checksum:
                    return
                event = Event.FromString(data)
                self._ends[path] = file.tell()
                yield event
