"""Tests of event files, which are read back with TensorBoard's own reader."""

from __future__ import annotations

import errno
import io
import os
import random
import time
from pathlib import Path

import pytest
import torch
from helpers.events import scalar_curves
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard.summary import scalar

from runner.storage.run_directory import StorageError
from runner.tracking.event_file import EventFile, points, record
from runner.tracking.tensorboard import TensorBoard


def test_sessions_are_read_in_order_even_if_the_clock_is_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for first_step, now in ((1, 2e9), (3, 2e9), (5, 1e9), (6, 2e9 + 7)):  # the same second; the clock set back
        monkeypatch.setattr(time, "time", lambda now=now: now)
        file = EventFile(tmp_path, first_step)
        for step in range(first_step, 9):
            file.add(points({"a": first_step}), step)
        file.close()
    assert scalar_curves(tmp_path)["a"] == [(1, 1), (2, 1), (3, 3), (4, 3), (5, 5), (6, 6), (7, 6), (8, 6)]


def test_an_added_event_can_be_read_at_once_and_a_full_disk_raises_a_storage_error(tmp_path: Path) -> None:
    file = EventFile(tmp_path, 1)
    file.add(scalar("a", 3.0), 2)
    assert scalar_curves(tmp_path)["a"] == [(2, 3.0)]
    os.dup2(os.open("/dev/full", os.O_WRONLY), file._file.fileno())
    with pytest.raises(StorageError) as caught:
        file.add(scalar("a", 3.0), 2)
    assert (caught.value.why, caught.value.path.parent) == ("No space left on device", tmp_path)
    file.close()  # does not raise again


@pytest.mark.parametrize("call", ["open", "add", "sync"])
def test_a_disk_that_fails_raises_a_storage_error_with_the_file(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    file = EventFile(tmp_path, 1)
    calls = {
        "open": (Path, "open", lambda: EventFile(tmp_path, 2)),
        "add": (EventFile, "_write", lambda: file.add(scalar("a", 3.0), 2)),
        "sync": (os, "fsync", file.sync),
    }
    owner, name, use = calls[call]
    monkeypatch.setattr(owner, name, fail)
    with pytest.raises(StorageError) as caught:
        use()
    assert caught.value.why == "Input/output error"
    assert caught.value.path.name.startswith("events.out.tfevents.")
    file.close()


def test_an_animation_that_cannot_be_written_raises_a_storage_error(tmp_path: Path) -> None:
    tracker = TensorBoard()
    tracker.open(tmp_path, 1)
    (tmp_path / "episode.gif").mkdir()
    with pytest.raises(StorageError) as caught:
        tracker.images({"eval/episode": torch.zeros(2, 3, 4, 4, dtype=torch.uint8)}, 2)
    assert (caught.value.path, caught.value.why) == (tmp_path / "episode.gif", "Is a directory")
    tracker.close(done=False)


@pytest.mark.parametrize("digits", ["9" * 235, "9" * 19, "٣" * 10])
def test_files_whose_number_is_not_that_of_a_session_are_ignored(tmp_path: Path, digits: str) -> None:
    """Otherwise, the number of the next file might be too long for a file name."""
    (tmp_path / f"events.out.tfevents.{digits}").write_bytes(b"somebody else's")
    before = int(time.time())
    EventFile(tmp_path, 0).close()
    [name] = {path.name for path in tmp_path.iterdir()} - {f"events.out.tfevents.{digits}"}
    assert before <= int(name.removeprefix("events.out.tfevents.")) <= time.time()


def test_records_are_written_as_tensorboard_writes_them() -> None:
    for length in (0, 1, 100, 5000):
        theirs, data = io.BytesIO(), random.Random(length).randbytes(length)
        RecordWriter(theirs).write(data)
        assert record(data) == theirs.getvalue()
