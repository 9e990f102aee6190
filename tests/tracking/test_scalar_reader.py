"""Event files that somebody else may have written are read in a short time, and without what is damaged."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.summary.writer.record_writer import RecordWriter

from runner.tracking.event_file import points
from runner.tracking.scalar_reader import scalars

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
    assert time.process_time() - begun < 3  # quadratic time was ten seconds


def test_long_events_are_skipped(tmp_path: Path) -> None:
    write(tmp_path, [scalar(1), scalar(2, count=10_000), scalar(3)])
    assert scalars(tmp_path, ["a"]) == {"a": {1: 1.0, 3: 3.0}}


def test_what_is_before_the_damage_is_read(tmp_path: Path) -> None:
    path = write(tmp_path, map(scalar, (1, 2, 3)))
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole[:-5] + b"x" + whole[-4:], whole[:-40] + (2**60).to_bytes(8, "little")):
        path.write_bytes(damaged)
        assert {1: 1.0}.items() <= scalars(tmp_path, ["a"])["a"].items() <= {1: 1.0, 2: 2.0}.items()
