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

import itertools
import logging
import math
import os
import re
import struct
import time
from collections.abc import Container, Iterator
from contextlib import ExitStack, suppress
from io import BufferedReader
from pathlib import Path
from typing import Any

import google_crc32c
from google.protobuf.message import DecodeError
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary

from runner.storage.files import open_regular, sync
from runner.storage.run_directory import free_name, storage_errors
from runner.system.secrets import printable

log = logging.getLogger(__name__)

MAX_POINTS = 3_000_000
"""The maximum number of events and points that are read of one run. They take about ten seconds and 400 MB."""
MAX_EVENT_BYTES = 1_000_000
"""The maximum size of an event with scalars. Larger events, which contain images, are skipped without being read."""
MAX_COPIED_BYTES = 200_000_000
"""The maximum size of an event that a later session copies."""

_VERSION = "brain.Event:2"
_NAME = re.compile(r"events\.out\.tfevents\.([0-9]{1,18})(?![0-9])")
"""The name of an event file, with the number of its session. A longer number might make the next name too long."""


class EventFile:
    """The event file of one session, which begins with the events of earlier sessions before its first step.

    It takes the place of their files, because TensorBoard's fast reader also shows the steps that a session repeats,
    and both of its readers show the first hyper-parameters of a run. Nothing is lost: the events of these steps are
    kept in `events.NUMBER.superseded`, and damaged files as `events.NUMBER.corrupt`, which TensorBoard does not read.
    If the process is killed meanwhile, the next session completes it.

    Args:
        directory: the run directory.
        first_step: the first step of the session.

    Raises:
        StorageError: if the disk is full or fails. `add`, `sync` and `remove_earlier` also raise this error.
    """

    def __init__(self, directory: Path, first_step: int):
        numbers = {path: int(match[1]) for path in directory.iterdir() if (match := _NAME.match(path.name))}
        number = max([int(time.time()), *(number + 1 for number in numbers.values())])
        self._path = directory / f"events.out.tfevents.{number:010d}"
        self._earlier, self._damaged = sorted(numbers), set[Path]()
        part = directory / "events.part" if numbers else self._path
        with storage_errors(self._path), ExitStack() as failed:
            if numbers:
                part.unlink(missing_ok=True)
            self._file = failed.enter_context(part.open("xb"))
            self._write(file_version=_VERSION)
            # Step 0: a TensorBoard that is running drops what it has read, and reads it again.
            self._write(step=0 if numbers else first_step, session_log=SessionLog(status=SessionLog.START))
            if numbers:
                self._copy_earlier(first_step)
                self._file.flush()
                os.fsync(self._file.fileno())
                os.replace(part, self._path)
                sync(directory)
            failed.pop_all()

    def _copy_earlier(self, first_step: int) -> None:
        """Copy all events of earlier files but their hyper-parameters, and those that a later session replaces."""
        aside = self._path.with_name(f"events.{self._path.suffix[1:]}.superseded")
        ends = [*map(_first_step, self._earlier[1:]), first_step]
        with ExitStack() as opened:
            superseded = None
            for number, path in enumerate(self._earlier):
                file, end, read = opened.enter_context(open_regular(path)), min(ends[number:]), 0
                for event, data in _events(file, MAX_COPIED_BYTES):
                    read += len(record(data))
                    if event.HasField("file_version") or event.HasField("session_log") or _is_hparams(event):
                        continue
                    if event.step < end:
                        self._file.write(record(data))
                    elif end > 0:  # otherwise, a later file has copied this one
                        if superseded is None:
                            superseded = opened.enter_context(aside.open("wb"))
                            superseded.write(record(Event(file_version=_VERSION).SerializeToString()))
                        superseded.write(record(data))
                if read != os.fstat(file.fileno()).st_size:
                    self._damaged.add(path)
            if superseded is not None:
                superseded.flush()
                os.fsync(superseded.fileno())
                log.info("what an earlier session logged from step %d on is now in %s", first_step, aside.name)

    def remove_earlier(self) -> None:
        """Remove the files of earlier sessions. They show the row of the HPARAMS tab until this file has another.

        Those with events are only emptied: a TensorBoard without its fast reader, while it runs, would never go on to
        the next file if the one that it has read last were missing.
        """
        with storage_errors(self._path):
            for path in self._earlier:
                if path.stat().st_size == 0:
                    path.unlink()
                    continue
                if path in self._damaged:
                    os.replace(path, free_name(path.with_name(path.name.replace("out.tfevents.", "")), "corrupt"))
                path.write_bytes(b"")

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
            for event, _ in _events(file, MAX_EVENT_BYTES):
                self._ends[path] = file.tell()
                yield event


def was_resumed(directory: Path) -> bool:
    """Return whether the events of a run are those of several sessions."""
    files = [path for path in directory.iterdir() if _NAME.match(path.name)]
    return len(files) > 1 or any(_first_step(path) == 0 for path in files)


def _first_step(path: Path) -> float:
    """Return the step from which on a file replaces those before it, and infinity if it replaces nothing."""
    with suppress(OSError), open_regular(path) as file:
        for event, _ in itertools.islice(_events(file, MAX_EVENT_BYTES), 2):
            if event.session_log.status == SessionLog.START:
                return event.step
    return math.inf


def _events(file: BufferedReader, limit: int) -> Iterator[tuple[Any, bytes]]:
    """Yield the events of a file from its position on, each also encoded, up to one that is damaged or incomplete.

    Events of more than `limit` bytes are skipped without being read.
    """
    while len(head := file.read(12)) == 12:  # the length of the event, and its checksum
        length = int.from_bytes(head[:8], "little")
        if length > limit:
            file.seek(length + 4, os.SEEK_CUR)
            continue
        data, checksum = file.read(length), file.read(4)
        if masked_crc32c(data) != checksum:
            return
        try:
            event = Event.FromString(data)
        except DecodeError:
            return
        yield event, data


def _is_hparams(event: Any) -> bool:
    return any(value.tag.startswith("_hparams_/") for value in event.summary.value)
