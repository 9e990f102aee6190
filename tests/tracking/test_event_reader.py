"""Tests that untrusted event files are read in a short time, and without damaged events."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.summary.writer.record_writer import RecordWriter

from runner.tracking import event_file
from runner.tracking.event_file import EventReader, points, scalars

NAME = "events.out.tfevents.0000000001"


def write(directory: Path, events: Iterable[bytes]) -> Path:
    with (directory / NAME).open("wb") as file:
        records = RecordWriter(file)
        for event in events:
            records.write(event)
    return directory / NAME


def scalar(step: int, count: int = 1) -> bytes:
    event = Event(step=step, summary=points({"a": float(step)}))
    for _ in range(count - 1):
        event.summary.value.append(event.summary.value[0])
    return event.SerializeToString()


def start(step: int) -> bytes:
    return Event(step=step, session_log=SessionLog(status=SessionLog.START)).SerializeToString()


def test_a_later_session_replaces_the_steps_that_it_computed_again(tmp_path: Path) -> None:
    write(tmp_path, [start(1), *map(scalar, (1, 2, 3, 4)), start(3), scalar(4), scalar(5), start(9)])
    assert scalars(tmp_path, ["a", "b"]) == {"a": {1: 1.0, 2: 2.0, 4: 4.0, 5: 5.0}}


def test_many_sessions_take_linear_time(tmp_path: Path) -> None:
    write(tmp_path, [*map(scalar, range(10_000)), *[start(10**9)] * 10_000])
    begun = time.process_time()
    assert len(scalars(tmp_path, ["a"])["a"]) == 10_000
    assert time.process_time() - begun < 3  # it took ten seconds when the time was quadratic


def test_long_events_are_skipped(tmp_path: Path) -> None:
    write(tmp_path, [scalar(1), scalar(2, count=100_000), scalar(3)])
    assert scalars(tmp_path, ["a"]) == {"a": {1: 1.0, 3: 3.0}}


def test_what_is_written_later_is_read_later(tmp_path: Path) -> None:
    """A reader sees a part of an event if the run is just writing it."""
    whole = write(tmp_path, [start(1), *map(scalar, (1, 2, 3))]).read_bytes()
    reader = EventReader(tmp_path, ["a"])
    for length, wanted in ((0, 0), (len(whole) - 30, 2), (len(whole) - 3, 2), (len(whole), 3)):
        (tmp_path / NAME).write_bytes(whole[:length])
        assert list(reader.read().get("a", {})) == [1, 2, 3][:wanted]


def many(steps: range, *tags: str) -> list[bytes]:
    return [Event(step=step, summary=points(dict.fromkeys(tags, float(step)))).SerializeToString() for step in steps]


def test_values_that_are_not_finite_are_left_out(tmp_path: Path) -> None:
    events = [Event(step=i, summary=points({"a": value})) for i, value in enumerate((1.0, math.nan, math.inf, 2.0))]
    write(tmp_path, [event.SerializeToString() for event in events])
    assert scalars(tmp_path) == {"a": {0: 1.0, 3: 2.0}}


def test_curves_beyond_the_limit_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, [*many(range(100), "a", "b"), *many(range(100, 110), "c", "d")])
    assert {tag: len(values) for tag, values in scalars(tmp_path).items()} == {"a": 100, "b": 100, "c": 10, "d": 10}
    assert caplog.messages == []
    monkeypatch.setattr(event_file, "MAX_POINTS", 3 * 50)
    assert {tag: len(values) for tag, values in scalars(tmp_path).items()} == {"a": 51, "b": 51}
    assert caplog.messages == [f"{tmp_path} has more events than are read: its curves end at step 50"]


def test_the_start_of_a_session_counts_as_one_point_per_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader examines every curve at the start of a session, so the time is bounded only if each curve counts."""
    monkeypatch.setattr(event_file, "MAX_POINTS", 500)
    tags = list(map(str, range(100)))
    for starts, steps in ((3, [0, 1]), (5, [0])):
        write(tmp_path, [*many(range(1), *tags), *[start(9)] * starts, *many(range(1, 2), "0")])
        assert list(scalars(tmp_path)["0"]) == steps


def test_large_images_are_skipped_without_being_read(tmp_path: Path) -> None:
    path = write(tmp_path, [scalar(1), scalar(2)])
    whole = path.read_bytes()
    with path.open("wb") as file:
        file.write((600_000_000).to_bytes(8, "little") + bytes(4))
        file.seek(600_000_004, os.SEEK_CUR)
        file.write(whole)
    assert scalars(tmp_path, ["a"]) == {"a": {1: 1.0, 2: 2.0}}


def test_events_before_the_first_damaged_one_are_read(tmp_path: Path) -> None:
    path = write(tmp_path, map(scalar, (1, 2, 3)))
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole[:-5] + b"x" + whole[-4:], whole[:-40] + (2**60).to_bytes(8, "little")):
        path.write_bytes(damaged)
        assert {1: 1.0}.items() <= scalars(tmp_path, ["a"])["a"].items() <= {1: 1.0, 2: 2.0}.items()


def test_later_sessions_are_read_if_the_file_of_one_session_is_damaged(tmp_path: Path) -> None:
    path = write(tmp_path, [start(3), *map(scalar, (3, 4))])
    later = path.rename(path.with_name("events.out.tfevents.0000000002"))
    whole = write(tmp_path, map(scalar, (1, 2, 3))).read_bytes()
    no_event = write(tmp_path, [scalar(1), b"\xff"]).read_bytes()
    for damaged in (whole[:-1], b"?" * 100, no_event):
        path.write_bytes(damaged)
        assert {3: 3.0, 4: 4.0}.items() <= scalars(tmp_path, ["a"])["a"].items()
    path.unlink()
    path.symlink_to(later)
    assert scalars(tmp_path, ["a"]) == {"a": {3: 3.0, 4: 4.0}}
