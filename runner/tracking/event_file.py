"""Functions that write TensorBoard event files synchronously.

`torch.utils.tensorboard.SummaryWriter` is not used, for two reasons:

- If a resumed session repeats steps, TensorBoard shows the values in the file that it reads last. TensorBoard reads
  files in the order of their names. If two sessions start in the same second, SummaryWriter gives their files names
  that may not be in the order of the sessions.
- The writer thread of SummaryWriter competes with the training loop for the GIL, and reports a full disk only at the
  next event.
"""

# pyright: reportAttributeAccessIssue=false
# (protobuf creates its classes at run time)

from __future__ import annotations

import os
import re
import struct
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import google_crc32c
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary

from runner.storage.run_directory import storage_errors

_NAME = re.compile(r"events\.out\.tfevents\.([0-9]{1,18})(?![0-9])")
"""A pattern for the name of an event file, which contains the number of its session.

A number with more than 18 digits is ignored: it is not from a session, and might make the next file name too long.
"""


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
        with storage_errors(self._path):
            self._file = self._path.open("xb")
            self._write(file_version="brain.Event:2")
            self._write(step=first_step, session_log=SessionLog(status=SessionLog.START))

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
        """Close the file."""
        with suppress(OSError):  # `add` has reported it
            self._file.close()

    def _write(self, **fields: Any) -> None:
        self._file.write(record(Event(wall_time=time.time(), **fields).SerializeToString()))


def record(data: bytes) -> bytes:
    """Return `data` as a record of an event file. TensorBoard's own writer takes 8 ms for an image of 20 kB."""
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
