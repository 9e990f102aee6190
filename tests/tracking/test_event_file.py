"""Tests of event files: TensorBoard reads what is written, and untrusted ones are read without damaged events."""

import errno
import math
import os
import time
from collections.abc import Iterable
from pathlib import Path
from unittest import mock

import pytest
import torch
from helpers.events import scalar_curves
from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard.summary import scalar

from runner.storage.run_directory import StorageError
from runner.tracking import event_file
from runner.tracking.event_file import EventFile, EventReader, points
from runner.tracking.tensorboard import TensorBoard


def scalars(directory: Path, tags: list[str] | None = None) -> dict[str, dict[int, float]]:
    return EventReader(directory, tags).read()


def test_sessions_are_read_in_order_even_if_the_clock_is_set_back(tmp_path, monkeypatch):
    for first_step, now in ((1, 2e9), (3, 2e9), (5, 1e9), (6, 2e9 + 7)):  # the same second; the clock set back
        monkeypatch.setattr(time, "time", lambda now=now: now)
        file = EventFile(tmp_path, first_step)
        for step in range(first_step, 9):
            file.add(points({"a": first_step}), step)
        file.close()
    assert scalar_curves(tmp_path)["a"] == [(1, 1), (2, 1), (3, 3), (4, 3), (5, 5), (6, 6), (7, 6), (8, 6)]


def test_an_added_event_can_be_read_at_once_and_a_disk_that_fails_raises_a_storage_error(tmp_path, monkeypatch):
    file = EventFile(tmp_path, 1)
    file.add(scalar("a", 3.0), 2)
    assert scalar_curves(tmp_path)["a"] == [(2, 3.0)]
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", mock.Mock(side_effect=OSError(errno.EIO, "Input/output error")))
        with pytest.raises(StorageError, match="Input/output error"):
            file.sync()
    os.dup2(os.open("/dev/full", os.O_WRONLY), file._file.fileno())
    with pytest.raises(StorageError) as caught:
        file.add(scalar("a", 3.0), 2)
    assert (caught.value.why, caught.value.path.parent) == ("No space left on device", tmp_path)
    file.close()  # does not raise again


def test_an_animation_that_cannot_be_written_raises_a_storage_error(tmp_path):
    tracker = TensorBoard()
    tracker.open(tmp_path, 1)
    (tmp_path / "episode.gif").mkdir()
    with pytest.raises(StorageError) as caught:
        tracker.images({"eval/episode": torch.zeros(2, 3, 4, 4, dtype=torch.uint8)}, 2)
    assert (caught.value.path, caught.value.why) == (tmp_path / "episode.gif", "Is a directory")
    tracker.close(done=False)


@pytest.mark.parametrize("digits", ["9" * 235, "9" * 19, "٣" * 10])
def test_files_whose_number_is_not_that_of_a_session_are_ignored(tmp_path, digits):
    """Otherwise, the number of the next file might be too long for a file name."""
    (tmp_path / f"events.out.tfevents.{digits}").write_bytes(b"somebody else's")
    before = int(time.time())
    EventFile(tmp_path, 0).close()
    [name] = {path.name for path in tmp_path.iterdir()} - {f"events.out.tfevents.{digits}"}
    assert before <= int(name.removeprefix("events.out.tfevents.")) <= time.time()


NAME = "events.out.tfevents.0000000001"


def write(directory: Path, events: Iterable[bytes]) -> Path:
    with (directory / NAME).open("wb") as file:
        records = RecordWriter(file)
        for event in events:
            records.write(event)
    return directory / NAME


def event(step: int, count: int = 1) -> bytes:
    found = Event(step=step, summary=points({"a": float(step)}))
    for _ in range(count - 1):
        found.summary.value.append(found.summary.value[0])
    return found.SerializeToString()


def start(step: int) -> bytes:
    return Event(step=step, session_log=SessionLog(status=SessionLog.START)).SerializeToString()


def test_a_later_session_replaces_the_steps_that_it_computed_again(tmp_path):
    write(tmp_path, [start(1), *map(event, (1, 2, 3, 4)), start(3), event(4), event(5), start(9)])
    assert scalars(tmp_path, ["a", "b"]) == {"a": {1: 1.0, 2: 2.0, 4: 4.0, 5: 5.0}}


def test_what_is_written_later_is_read_later(tmp_path):
    """A reader sees a part of an event if the run is just writing it."""
    whole = write(tmp_path, [start(1), *map(event, (1, 2, 3))]).read_bytes()
    reader = EventReader(tmp_path, ["a"])
    for length, wanted in ((0, 0), (len(whole) - 30, 2), (len(whole) - 3, 2), (len(whole), 3)):
        (tmp_path / NAME).write_bytes(whole[:length])
        assert list(reader.read().get("a", {})) == [1, 2, 3][:wanted]


def many(steps: range, *tags: str) -> list[bytes]:
    return [Event(step=step, summary=points(dict.fromkeys(tags, float(step)))).SerializeToString() for step in steps]


def test_values_that_are_not_finite_are_left_out(tmp_path):
    events = [Event(step=i, summary=points({"a": value})) for i, value in enumerate((1.0, math.nan, math.inf, 2.0))]
    write(tmp_path, [each.SerializeToString() for each in events])
    assert scalars(tmp_path) == {"a": {0: 1.0, 3: 2.0}}


def test_curves_beyond_the_limit_are_reported(tmp_path, monkeypatch, caplog):
    write(tmp_path, [*many(range(100), "a", "b"), *many(range(100, 110), "c", "d")])
    assert {tag: len(values) for tag, values in scalars(tmp_path).items()} == {"a": 100, "b": 100, "c": 10, "d": 10}
    assert caplog.messages == []
    monkeypatch.setattr(event_file, "MAX_POINTS", 3 * 50)
    assert {tag: len(values) for tag, values in scalars(tmp_path).items()} == {"a": 51, "b": 51}
    assert caplog.messages == [f"{tmp_path} has more events than are read: its curves end at step 50"]


def test_the_start_of_a_session_counts_as_one_point_per_curve(tmp_path, monkeypatch):
    """All curves are examined then: otherwise, the events of a stranger would take any time."""
    monkeypatch.setattr(event_file, "MAX_POINTS", 500)
    for starts, steps in ((3, [0, 1]), (5, [0])):
        write(tmp_path, [*many(range(1), *map(str, range(100))), *[start(9)] * starts, *many(range(1, 2), "0")])
        assert list(scalars(tmp_path)["0"]) == steps


def test_large_events_are_skipped_without_being_read(tmp_path):
    path = write(tmp_path, [event(1), event(2, count=100_000), event(3)])
    whole = path.read_bytes()
    with path.open("wb") as file:
        file.write((600_000_000).to_bytes(8, "little") + bytes(4))
        file.seek(600_000_004, os.SEEK_CUR)
        file.write(whole)
    assert scalars(tmp_path, ["a"]) == {"a": {1: 1.0, 3: 3.0}}


def test_events_before_a_damaged_one_and_those_of_later_sessions_are_read(tmp_path):
    path = write(tmp_path, [start(4), *map(event, (4, 5))])
    later = path.rename(path.with_name("events.out.tfevents.0000000002"))
    whole = write(tmp_path, map(event, (1, 2, 3))).read_bytes()
    no_event = write(tmp_path, [event(1), b"\xff"]).read_bytes()
    cuts = whole[:-1], whole[:-5] + b"x" + whole[-4:], whole[:-40] + (2**60).to_bytes(8, "little")
    for damaged in (*cuts, no_event, b"?" * 100):
        path.write_bytes(damaged)
        first = {} if damaged.startswith(b"?") else {1: 1.0}
        found = scalars(tmp_path, ["a"])["a"]
        assert (first | {4: 4.0, 5: 5.0}).items() <= found.items() <= {1: 1.0, 2: 2.0, 4: 4.0, 5: 5.0}.items()
    path.unlink()
    path.symlink_to(later)
    assert scalars(tmp_path, ["a"]) == {"a": {4: 4.0, 5: 5.0}}
