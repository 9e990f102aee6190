"""Tests of event files: TensorBoard reads what is written, and untrusted ones are read without damaged events."""

import errno
import math
import os
import struct
import time
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from helpers.events import (
    curves_of_runs,
    fast_reader,
    hparams_tab,
    multiplexer_of,
    provider_of,
    scalar_curves,
    slow_reader,
)
from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import scalar

from runner.storage.run_directory import StorageError
from runner.tracking import event_file
from runner.tracking.event_file import EventFile, EventReader, points
from runner.tracking.tensorboard import TensorBoard


def float_bytes(value: float) -> bytes:
    """Return `value` as a field `simple_value` of an event."""
    return b"\x15" + struct.pack("<f", value)


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


def session(directory: Path, steps: range, lr: float, eval_every: int = 3) -> None:
    """Run a session that logs the curve `a`, its learning rate times the step, and at each evaluation also `b`."""
    tracker = TensorBoard()
    tracker.open(directory, steps.start)
    try:
        tracker.texts({"config": f"lr: {lr}"}, steps.start)
        tracker.hyperparameters({}, {"lr": lr})
        for step in steps:
            tracker.scalars({"a": lr * step} | ({"b": lr} if step % eval_every == 0 else {}), step)
    finally:
        tracker.close("stopped")


SET_BACK = {
    "a": [(1, 0.25), (2, 0.5), (3, 0.75), (4, 2.0), (5, 20.0), (6, 24.0), (7, 28.0), (8, 32.0)],
    "b": [(3, 0.25), (7, 4.0)],
}
"""What is left of the sessions of `set_back`: steps 1 to 3 of the first one, 4 of the second, and the last one."""


def set_back(run: Path) -> None:
    """Run sessions of which the first is killed after its checkpoint, and the second is set back to an earlier one."""
    run.mkdir()
    session(run, range(1, 6), lr=0.25)
    session(run, range(4, 13), lr=0.5)
    session(run, range(5, 9), lr=4.0, eval_every=7)


def test_both_readers_show_no_step_that_was_set_aside_and_the_options_of_the_last_session(tmp_path):
    set_back(tmp_path / "run")
    with fast_reader(tmp_path) as fast:
        for reader in (fast, slow_reader(tmp_path)):
            assert curves_of_runs(reader) == {"run": SET_BACK}
            [row] = hparams_tab(tmp_path, reader).rows
            assert row["hparams"] == {"lr": 4.0}
    assert scalars(tmp_path / "run") == {tag: dict(points) for tag, points in SET_BACK.items()}


def test_both_readers_show_the_same_if_they_are_running_all_the_time(tmp_path):
    run, running = tmp_path / "run", multiplexer_of(tmp_path)
    run.mkdir()
    with fast_reader(tmp_path, reload_seconds=1) as fast:
        for steps, lr, eval_every in ((range(1, 6), 0.25, 3), (range(4, 13), 0.5, 3), (range(5, 9), 4.0, 7)):
            session(run, steps, lr, eval_every)
            running.AddRunsFromDirectory(str(tmp_path)).Reload()
            until, wanted = time.monotonic() + 10, curves_of_runs(provider_of(running, tmp_path))
            while curves_of_runs(fast) != wanted and time.monotonic() < until:
                time.sleep(0.05)
            assert curves_of_runs(fast) == wanted
    assert wanted == {"run": SET_BACK}


def test_a_kill_at_any_time_while_earlier_events_are_taken_over_loses_none_of_them(tmp_path):
    """What was logged is in the event files or set aside, and both readers show each step of the run once."""
    operations = 0
    for number in range(20):
        run = tmp_path / str(number) / "run"
        run.mkdir(parents=True)
        session(run, range(1, 7), lr=0.25)
        operations = 0

        def counted(original: Any, *arguments: Any, number: int = number) -> Any:
            nonlocal operations
            operations += 1
            if operations == number:
                raise KeyboardInterrupt
            return original(*arguments)

        with ExitStack() as patched, suppress(KeyboardInterrupt):
            for owner, name in ((os, "fsync"), (os, "replace"), (event_file, "sync"), (Path, "write_bytes")):
                wrapped = partial(counted, getattr(owner, name))
                patched.enter_context(mock.patch.object(owner, name, lambda *a, f=wrapped: f(*a)))
            session(run, range(4, 4), lr=0.5)
        with fast_reader(run.parent) as fast:
            kept = {"a": [(1, 0.25), (2, 0.5), (3, 0.75)], "b": [(3, 0.25)]}
            for shown in (curves_of_runs(each)["run"] for each in (fast, slow_reader(run.parent))):
                assert {tag: [p for p in points if p[0] < 4] for tag, points in shown.items()} == kept
        session(run, range(4, 5), lr=0.5)
        assert scalar_curves(run) == {"a": [*kept["a"], (4, 2.0)], "b": kept["b"]}
        saved = b"".join(path.read_bytes() for path in run.glob("events.*"))
        assert all(saved.count(each) for each in map(float_bytes, (0.25, 0.5, 0.75, 1.0, 1.25, 1.5)))
        if operations < number:
            break
    assert 5 < operations < 19


def test_what_a_writer_of_the_users_has_logged_to_the_run_directory_is_shown_after_a_resume(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    session(run, range(1, 6), lr=0.25)
    with SummaryWriter(str(run)) as writer:
        for step in range(6):
            writer.add_scalar("mine", step, step)
    session(run, range(4, 7), lr=0.5)
    with fast_reader(tmp_path) as fast:
        for reader in (fast, slow_reader(tmp_path)):
            assert curves_of_runs(reader)["run"]["mine"] == [(0, 0), (1, 1), (2, 2), (3, 3)]
            assert [step for step, _ in curves_of_runs(reader)["run"]["a"]] == [1, 2, 3, 4, 5, 6]


def test_the_rest_of_a_damaged_file_is_kept(tmp_path):
    session(tmp_path, range(1, 4), lr=0.25)
    [path] = tmp_path.iterdir()
    damaged = path.read_bytes() + b"\0" * 100
    path.write_bytes(damaged)
    session(tmp_path, range(4, 5), lr=0.5)
    assert [each.read_bytes() for each in tmp_path.glob("events.*.corrupt")] == [damaged]
    assert scalar_curves(tmp_path)["a"] == [(1, 0.25), (2, 0.5), (3, 0.75), (4, 2.0)]


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
    tracker.close("stopped")


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
