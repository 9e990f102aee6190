"""Writes TensorBoard event files synchronously, and reads scalars from those of a run.

A file that is read may be damaged, or written by somebody else. `torch.utils.tensorboard.SummaryWriter` is not used:

- TensorBoard shows the values in the file that comes last by name, and the names that SummaryWriter gives to the files
  of sessions that start in the same second may be in another order than the sessions.
- Its thread competes with the training loop for the GIL, reports a full disk only at the next event, and computes the
  checksums of images byte by byte in Python.
"""

# pyright: reportAttributeAccessIssue=false
# (protobuf creates its classes at run time)

from __future__ import annotations

import logging
import math
import os
import re
import struct
import time
from collections.abc import Container, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import google_crc32c
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary

from runner.storage.files import open_regular
from runner.storage.run_directory import storage_errors
from runner.system.secrets import printable

log = logging.getLogger(__name__)

MAX_POINTS = 3_000_000
"""The maximum number of events and points that are read of one run. They take about ten seconds and 400 MB."""
MAX_EVENT_BYTES = 1_000_000
"""The maximum size of an event with scalars. Larger events, which contain images, are skipped without being read."""

_NAME = re.compile(r"events\.out\.tfevents\.([0-9]{1,18})(?![0-9])")
"""The name of an event file, with the number of its session. A longer number might make the next name too long."""


class EventFile:
    """The event file of one session. TensorBoard reads it after the files of earlier sessions.

    Args:
        directory: the run directory.
        first_step: the first step of the session. TensorBoard drops the points that earlier sessions have logged for
            this step and for later steps.

    Raises:
        StorageError: if the disk is full or fails. `add` and `sync` also raise this error.
    """

    def __init__(self, directory: Path, first_step: int):
        earlier = [int(match[1]) for path in directory.iterdir() if (match := _NAME.match(path.name))]
        number = max([int(time.time()), *(number + 1 for number in earlier)])
        self._path = directory / f"events.out.tfevents.{number:010d}"
        with storage_errors(self._path), ExitStack() as failed:
            self._file = failed.enter_context(self._path.open("xb"))
            self._write(file_version="brain.Event:2")
            self._write(step=first_step, session_log=SessionLog(status=SessionLog.START))
            failed.pop_all()

    def add(self, summary: Summary, step: int = 0) -> None:
        """Write `summary` for the optimizer step `step`. Once written, it is not lost if the process is killed."""
        with storage_errors(self._path):
            self._write(step=step, summary=summary)
            self._file.flush()

    def sync(self) -> None:
        """Flush all events to disk."""
        with storage_errors(self._path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        with suppress(OSError):  # `add` has reported it
            self._file.close()

    def _write(self, **fields: Any) -> None:
        self._file.write(record(Event(wall_time=time.time(), **fields).SerializeToString()))


def record(data: bytes) -> bytes:
    """Return `data` as a record of an event file."""
    length = struct.pack("<Q", len(data))
    return length + masked_crc32c(length) + data + masked_crc32c(data)


def masked_crc32c(data: bytes) -> bytes:
    """Return the CRC-32C checksum of `data`, rotated and shifted as in event files, in 4 bytes."""
    checksum = google_crc32c.value(data)
    return struct.pack("<I", ((checksum >> 15 | checksum << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def points(values: dict[str, float]) -> Summary:
    """Return a summary with one scalar for each tag in `values`."""
    return Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])


def picture(tag: str, encoded: bytes, height: int, width: int) -> Summary:
    """Return a summary with an RGB image or an animation: the content of a PNG or GIF file, and its size in pixels."""
    shown = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=encoded)
    return Summary(value=[Summary.Value(tag=tag, image=shown)])


class EventReader:
    """The scalars in the event files of the run in `directory`, which may still be running.

    `tags` are those to read; None for all. If `finite`, other values are left out. Each file is read up to its first
    damaged event. If there is more than can be read, a warning is logged.
    """

    def __init__(self, directory: Path, tags: Container[str] | None = None, finite: bool = True):
        self._directory, self._tags, self._finite, self._left = directory, tags, finite, MAX_POINTS
        self._curves: dict[str, dict[int, float]] = {}
        self._ends: dict[Path, int] = {}  # how many bytes of each file have been read

    def read(self) -> dict[str, dict[int, float]]:
        """Read what was written since the last call, and return all values by tag and, in order, by step.

        Of steps that a resumed session has repeated, its values are returned.
        """
        for path in sorted(self._directory.glob("events.out.tfevents.*")):
            for event in self._new_events(path):
                self._add(event)
                if self._left < 0:
                    last = max((step for values in self._curves.values() for step in values), default=0)
                    name = printable(str(self._directory))
                    log.warning("%s has more events than are read: its curves end at step %s", name, f"{last:,}")
                    return self._curves
        return {tag: values for tag, values in self._curves.items() if values}

    def _add(self, event: Any) -> None:
        self._left -= 1 + len(event.summary.value)
        if event.session_log.status == event.session_log.START:  # a session that computes the later steps once more
            self._left -= len(self._curves)  # all of which are examined
            for values in self._curves.values():
                while values and next(reversed(values)) >= event.step:  # the steps of a session are in order
                    values.popitem()
        for each in event.summary.value:
            wanted = self._tags is None or each.tag in self._tags
            is_read = wanted and each.HasField("simple_value")
            if is_read and (math.isfinite(each.simple_value) or not self._finite):
                self._curves.setdefault(each.tag, {})[event.step] = each.simple_value

    def _new_events(self, path: Path) -> Iterator[Any]:
        """Yield the events of a file that have not been read, up to one that is damaged or incomplete."""
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
