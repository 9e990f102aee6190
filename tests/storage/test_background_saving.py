"""Tests of checkpoints that threads write during training: their content, their errors, and several ranks."""

import errno
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.command import TIMEOUT_SECONDS
from helpers.compose import TINY_CPU, compose_config
from helpers.handmade_runs import begin_to_save, checkpoints_of_two_ranks, save_and_wait
from helpers.programs import interrupt_while_a_disk_hangs
from helpers.runs import assert_bitwise_equal

import runner.storage.checkpoints
from runner.result import CrashedError
from runner.storage.checkpoint import Checkpoint, load
from runner.storage.checkpoints import Checkpoints, Writing
from runner.storage.run_directory import StorageError, saved_steps
from runner.tracking.progress import Progress
from runner.workloads.classifier import Classifier

EVERY = ("steps=6", "save_every=2", "eval_every=3", "log_every=3", "keep=9")
DIGITS = (*TINY_CPU, *EVERY, "model.dropout=0.2", "optimizer=adamw", "accumulation=2", "batch_size=48")
AGENT = ("workload=dqn", *EVERY, "env.num_envs=4", "workload.warm_up=64", "workload.eval_episodes=2", "batch_size=16")
RUNS = {
    "single": (1, DIGITS),
    "streams": (1, (*DIGITS, "parallel=pipeline", "parallel.cuts=[conv2]", "parallel.engine=streams")),
    "dqn": (1, (*AGENT, "device=cpu", "device.threads=1")),
    "ddp": (2, (*DIGITS, "parallel=ddp")),
    "fsdp": (2, (*DIGITS, "parallel=fsdp")),
    "pipeline": (2, (*DIGITS, "parallel=pipeline", "parallel.cuts=[conv2]")),
    "ensemble": (2, (*DIGITS, "parallel=ensemble")),
}
"""The number of processes and the overrides of each run."""


class DeferredWriting:
    """Stands for the thread that writes a checkpoint: it writes when it is waited for."""

    error = None

    def __init__(self, write: Callable[[], None]) -> None:
        self.join = write

    def is_alive(self) -> bool:
        return True


def write_by(kind: Any, *_: Any) -> None:
    runner.storage.checkpoints.Writing = kind


@pytest.mark.parametrize("name", RUNS)
def test_the_content_of_a_checkpoint_does_not_depend_on_when_it_is_written(name, tmp_path, ranks):
    """The content of a checkpoint is a copy, which shares no memory with tensors that the training changes."""
    processes, overrides = RUNS[name]
    for directory, kind in (("at_once", Writing), ("late", DeferredWriting)):
        ranks(processes).train(compose_config(*overrides), tmp_path / directory, partial(write_by, kind))
    ranks(processes).call_on_all(write_by, Writing)
    checkpoints = [sorted((tmp_path / name / "checkpoints").glob("step_*")) for name in ("late", "at_once")]
    assert len(checkpoints[0]) >= 3
    for late, at_once in zip(*checkpoints, strict=True):
        assert late.name == at_once.name
        for rank in range(processes):
            assert_bitwise_equal(vars(load(late, rank)), vars(load(at_once, rank)), late.name)


def content(step: int) -> Checkpoint:
    return Checkpoint(step, {"w": torch.full((2,), float(step))}, {}, {"step": step})


def hold(monkeypatch: pytest.MonkeyPatch, *ranks: int) -> threading.Event:
    """Block the threads of `ranks` that write checkpoints until the returned event is set."""
    write, opened = Checkpoints._write, threading.Event()

    def held(self: Checkpoints, *arguments: Any) -> None:
        assert self.rank not in ranks or opened.wait(60)
        write(self, *arguments)

    monkeypatch.setattr(Checkpoints, "_write", held)
    return opened


def test_save_returns_before_the_checkpoint_is_written_and_the_next_save_waits(tmp_path, monkeypatch):
    opened, checkpoints = hold(monkeypatch, 0), Checkpoints(tmp_path, keep=9)
    checkpoints.save(content(1))
    checkpoints.check()
    assert saved_steps(checkpoints.root) == []
    next_one = threading.Thread(target=checkpoints.save, args=(content(2),))
    next_one.start()
    time.sleep(0.1)
    assert next_one.is_alive()
    assert not (checkpoints.root / "tmp.step_00000002").exists()
    opened.set()
    next_one.join(60)
    checkpoints.wait()
    assert saved_steps(checkpoints.root) == [1, 2]


def test_training_goes_on_while_a_checkpoint_is_written(trained, monkeypatch):
    opened, seen = hold(monkeypatch, 0), list[int]()

    def step(_: Progress, number: int) -> None:
        seen.append(number)
        if number == 7:  # three steps after the save
            opened.set()

    monkeypatch.setattr(Progress, "step", step)
    run = trained("steps=12", "save_every=4", "eval_every=0", "keep=9")
    assert (run.result.status, seen) == ("done", list(range(1, 13)))
    assert saved_steps(run.directory / "checkpoints") == [4, 8, 12]


@pytest.mark.parametrize(("steps", "ended"), [(4000, range(8, 17)), (8, range(8, 9))])
def test_an_error_of_the_thread_ends_the_run(steps, ended, trained, monkeypatch):
    """At the next save at the latest, or after the last step."""
    fsync = os.fsync

    def full(descriptor: int) -> None:
        if "step_00000008" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CrashedError) as caught:
        trained(f"steps={steps}", "save_every=8", "eval_every=0", "keep=9")
    assert caught.value.result.status == "crashed"
    assert caught.value.result.steps in ended
    assert isinstance(caught.value.__cause__, StorageError)
    assert "No space left on device" in caught.value.result.error


@pytest.mark.parametrize("error", [ZeroDivisionError("planted"), None])
def test_a_checkpoint_is_completed_after_the_training_failed(trained, tmp_path, monkeypatch, error):
    write = Checkpoints._write

    def slow(*arguments: Any) -> None:
        time.sleep(0.3)
        write(*arguments)

    criterion, steps = Classifier.criterion, iter(range(1, 99))

    def failing(*arguments: Any) -> torch.Tensor:
        if next(steps) != 5:
            return criterion(*arguments)
        if error is not None:
            raise error
        return criterion(*arguments) * float("nan")

    monkeypatch.setattr(Checkpoints, "_write", slow)
    monkeypatch.setattr(Classifier, "criterion", failing)
    overrides = ("steps=9", "save_every=4", "log_every=5", "eval_every=0")
    if error is None:
        assert trained(*overrides).result.status == "diverged"
    else:
        with pytest.raises(CrashedError):
            trained(*overrides)
    assert saved_steps(tmp_path / "run" / "checkpoints") == [4]


def test_rank_0_commits_when_the_files_of_all_ranks_are_complete(tmp_path, monkeypatch):
    opened, ranks = hold(monkeypatch, 1), checkpoints_of_two_ranks(tmp_path)
    begin_to_save(ranks, [content(3)] * 2)
    part = ranks[0].root / "tmp.step_00000003"
    while not (part / "config.yaml").exists() and not (part / "state.pt").exists():
        time.sleep(0.01)
    (part / "rank_1.pt.part").write_bytes(b"half")
    time.sleep(0.1)
    assert saved_steps(ranks[0].root) == []
    opened.set()
    for rank in ranks:
        rank.wait()
    assert [load(ranks[0].root / "step_00000003", rank).local for rank in (0, 1)] == [{"step": 3}] * 2
    assert not list(tmp_path.rglob("*.part"))


def test_after_an_error_rank_0_does_not_wait_for_ranks_that_may_be_gone(tmp_path, monkeypatch):
    opened, ranks = hold(monkeypatch, 1), checkpoints_of_two_ranks(tmp_path)
    begin_to_save(ranks, [content(3)] * 2)
    since = time.monotonic()
    ranks[0].finish_after_error()
    assert time.monotonic() - since < 50, "not the timeout"
    assert saved_steps(ranks[0].root) == []
    opened.set()
    save_and_wait(Checkpoints(tmp_path, keep=9), content(4))
    assert saved_steps(ranks[0].root) == [4]


def test_a_rank_with_a_full_disk_deletes_only_its_own_file_and_is_named(tmp_path, monkeypatch):
    save = runner.storage.checkpoints._save

    def full(value: Any, path: Path) -> None:
        if path.name.startswith("rank_1"):
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save(value, path)

    monkeypatch.setattr(runner.storage.checkpoints, "_save", full)
    ranks = checkpoints_of_two_ranks(tmp_path, timeout=0.2)
    begin_to_save(ranks, [content(3)] * 2)
    with pytest.raises(StorageError, match="No space left on device"):
        ranks[1].wait()
    assert not list(tmp_path.rglob("rank_1*"))
    with pytest.raises(StorageError, match=r"rank 1 has not written its file .*parallel\.timeout"):
        ranks[0].wait()
    assert not list(tmp_path.rglob("tmp.*/*")), "an empty directory needs no room"


def test_an_interrupted_process_does_not_wait_for_a_disk_that_hangs(tmp_path):
    process = multiprocessing.get_context("forkserver").Process(target=interrupt_while_a_disk_hangs, args=(tmp_path,))
    process.start()
    process.join(TIMEOUT_SECONDS)
    assert process.exitcode == 130


def test_wait_returns_after_the_thread_has_ended(tmp_path):
    """The thread frees tensors after writing them; a process that exits meanwhile would be aborted."""
    seen = threading.Event()
    checkpoints = Checkpoints(tmp_path, keep=2, texts={"a": lambda: str(seen.wait(TIMEOUT_SECONDS))})
    for wait in (checkpoints.wait, checkpoints.finish_after_error):
        seen.clear()
        checkpoints.save(content(1))
        assert "checkpoint" in {thread.name for thread in threading.enumerate()}
        seen.set()
        wait()
        assert "checkpoint" not in {thread.name for thread in threading.enumerate()}
