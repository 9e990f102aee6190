"""TensorBoard's events of one session, written where the loop stands.

torch's `SummaryWriter` does not do here. It names its file by the second and the process id, while TensorBoard reads
files in the order of their names, and only so knows what a resumed run computes again. It hands events to a thread,
which competes with the loop for the interpreter, and tells of a full disk when the next event comes.
"""

# pyright: reportAttributeAccessIssue=false
# (protobuf makes its classes when its modules are imported)

from __future__ import annotations

import os
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.plugins.hparams import metadata, plugin_data_pb2
from tensorboard.plugins.hparams.api_pb2 import STATUS_SUCCESS
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard.summary import Summary

from runner.storage.run_directory import StorageError

_NAME = re.compile(r"events\.out\.tfevents\.(\d+)")


class EventFile:
    """The events of one session, in a file that TensorBoard reads after those of the sessions before.

    Args:
        directory: the run's.
        first_step: the session's: what earlier sessions logged from this step on is computed again, and purged.
    """

    def __init__(self, directory: Path, first_step: int):
        earlier = [int(match[1]) for path in directory.iterdir() if (match := _NAME.match(path.name))]
        number = max([int(time.time()), *(number + 1 for number in earlier)])
        self._file = (directory / f"events.out.tfevents.{number:010d}").open("xb")
        self._records = RecordWriter(self._file)
        self._write(file_version="brain.Event:2")
        self._write(step=first_step, session_log=SessionLog(status=SessionLog.START))

    def add(self, summary: Summary, step: int = 0) -> None:
        """Write a summary: when this returns, it survives the death of the process.

        Raises:
            StorageError: when the disk is full or gone.
        """
        try:
            self._write(step=step, summary=summary)
            self._file.flush()
        except OSError as error:
            raise StorageError(Path(self._file.name), error.strerror or str(error)) from error

    def sync(self) -> None:
        """Wait until all events are on the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        with suppress(OSError):  # `add` told of it
            self._file.close()

    def _write(self, **fields: Any) -> None:
        self._records.write(Event(wall_time=time.time(), **fields).SerializeToString())


def points(values: dict[str, float]) -> Summary:
    """A point of the curve of each tag."""
    return Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])


def animation(tag: str, gif: bytes, height: int, width: int) -> Summary:
    """A film, which TensorBoard shows among the images."""
    shown = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=gif)
    return Summary(value=[Summary.Value(tag=tag, image=shown)])


def row_start(values: dict[str, float | str | bool]) -> Summary:
    """A run's row in the HPARAMS tab.

    There is no `Experiment` beside it, which would fix the columns of a whole sweep to those of its first run:
    TensorBoard finds them by itself, and shows those first that differ.
    """
    start = plugin_data_pb2.SessionStartInfo(start_time_secs=time.time())
    for name, value in values.items():
        kind = "bool" if isinstance(value, bool) else "string" if isinstance(value, str) else "number"
        setattr(start.hparams[name], f"{kind}_value", value)
    return _hparams(metadata.SESSION_START_INFO_TAG, session_start_info=start)


def row_end() -> Summary:
    """What marks the row's run as done."""
    end = plugin_data_pb2.SessionEndInfo(status=STATUS_SUCCESS, end_time_secs=time.time())
    return _hparams(metadata.SESSION_END_INFO_TAG, session_end_info=end)


def _hparams(tag: str, **content: Any) -> Summary:
    data = plugin_data_pb2.HParamsPluginData(version=metadata.PLUGIN_DATA_VERSION, **content)
    value = Summary.Value(tag=tag, metadata=metadata.create_summary_metadata(data), tensor=metadata.NULL_TENSOR)
    return Summary(value=[value])
