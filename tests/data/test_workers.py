"""Tests of data workers: the same results with any number of them, and errors if they die or hang."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from helpers.command import TIMEOUT_SECONDS, child_environment

from runner.data.base import DataError
from runner.data.workers import Workers, default_count


class Squares:
    """A loader of jobs of the form (number, seconds, fate), which sleeps for `seconds` before it handles a job.

    If `fate` is `live`, the loader returns the square of `number`, and the id and the number of threads of the process
    that the loader runs in. If `fate` is `raise`, it raises an error. Otherwise, `fate` is the name of a signal, which
    the loader sends to its own process.
    """

    def __call__(self, job):
        number, seconds, fate = job
        time.sleep(seconds)
        if fate == "raise":
            raise ValueError(f"no square of {number}")
        if fate != "live":
            os.kill(os.getpid(), getattr(signal, fate))
        return torch.tensor([number**2, os.getpid(), torch.get_num_threads()])


def jobs(count: int, seconds: float = 0, fates: dict[int, str] | None = None):
    return ((number, seconds, (fates or {}).get(number, "live")) for number in range(count))


@pytest.fixture
def others():
    """Return the child processes that earlier tests have left running."""
    return set(multiprocessing.active_children())


@pytest.mark.parametrize("count", [0, 2])
def test_results_come_in_order_from_the_requested_number_of_processes(count, others):
    workers = Workers(count)
    results = torch.stack(list(workers.read(Squares(), jobs(20, 0.01))))
    assert results[:, 0].tolist() == [number**2 for number in range(20)]
    pids = set(results[:, 1].tolist())
    started = {process.pid for process in set(multiprocessing.active_children()) - others}
    assert (pids <= started, len(started)) == (True, 2) if count else pids == {os.getpid()}
    assert count == 0 or results[:, 2].tolist() == [1] * 20  # number of threads
    workers.close()
    assert set(multiprocessing.active_children()) <= others


@pytest.mark.parametrize("count", [0, 2])
def test_jobs_are_requested_only_as_needed_and_an_error_is_raised_unchanged(count, others):
    asked, workers = [], Workers(count, ahead=3)

    def endless():
        for job in jobs(10**9, 0, {5: "raise"}):
            asked.append(job[0])
            yield job

    results = workers.read(Squares(), endless())
    assert len(list(itertools.islice(results, 5))) == 5
    assert len(asked) <= 5 + max(1, count * 3)
    with pytest.raises(ValueError, match="no square of 5"):
        next(results)
    workers.close()
    assert set(multiprocessing.active_children()) <= others


def test_one_set_of_workers_serves_iterations_that_overlap_or_are_not_completed(others):
    workers = Workers(2)

    def squares() -> list[int]:
        return [int(result[0]) for result in workers.read(Squares(), jobs(8))]

    open_pass = workers.read(Squares(), jobs(100))
    assert next(open_pass)[0] == 0
    started = set(multiprocessing.active_children()) - others
    assert squares() == [number**2 for number in range(8)]
    assert next(open_pass)[0] == 1
    open_pass.close()
    assert squares() == [number**2 for number in range(8)]
    assert set(multiprocessing.active_children()) - others == started
    workers.close()
    assert set(multiprocessing.active_children()) <= others
    assert squares() == [number**2 for number in range(8)], "new ones"
    workers.close()


def stop(processes) -> None:
    for process in processes:
        os.kill(process.pid, signal.SIGSTOP)


@pytest.mark.parametrize("fate", ["SIGKILL", "SIGSTOP"])
def test_a_worker_that_died_or_stopped_between_two_passes_raises_an_error(fate, others):
    workers = Workers(1)
    assert len(list(workers.read(Squares(), jobs(4)))) == 4
    workers.timeout = 1
    for process in set(multiprocessing.active_children()) - others:
        os.kill(process.pid, getattr(signal, fate))  # pyright: ignore[reportArgumentType]
    with pytest.raises(DataError) as raised:
        list(workers.read(Squares(), jobs(4)))
    assert {"SIGKILL": "SIGKILL", "SIGSTOP": " 1 s"}[fate] in raised.value.why
    assert set(multiprocessing.active_children()) <= others


def read_to_the_end(results, first: int = 0) -> tuple[DataError, float]:
    """Read until a `DataError` is raised; return the error, and the seconds since the last result."""
    since = time.monotonic()
    try:
        for number, result in enumerate(results, start=first):
            assert result[0] == number**2
            since = time.monotonic()
    except DataError as error:
        return error, time.monotonic() - since
    pytest.fail("no error came")


@pytest.mark.parametrize("fate", ["SIGKILL", "SIGBUS"])
def test_a_killed_worker_raises_an_error_at_once(fate, others):
    error, _ = read_to_the_end(Workers(2, timeout=2 * TIMEOUT_SECONDS).read(Squares(), jobs(1000, 0, {20: fate})))
    assert fate in error.why
    assert "data.workers=0" in error.remedy, "not the timeout's"
    assert set(multiprocessing.active_children()) <= others


def test_a_suspended_worker_raises_an_error_after_the_timeout(others):
    workers = Workers(2)
    results = workers.read(Squares(), jobs(1000, 0.01, {20: "SIGSTOP"}))
    assert next(results)[0] == 0
    workers.timeout = 2  # set only after the workers have started, which may take long
    error, seconds = read_to_the_end(results, first=1)
    assert " 2 s" in error.why
    assert "data.timeout" in error.remedy
    assert seconds > 1, "it was waited for"
    assert set(multiprocessing.active_children()) <= others


def test_workers_suspended_while_they_send_batches_raise_an_error(others):
    workers = Workers(2)
    results = workers.read(Squares(), jobs(100_000))
    next(results)
    stop(set(multiprocessing.active_children()) - others)  # perhaps before they have sent the memory of a batch
    workers.timeout = 1
    with pytest.raises(DataError, match="no batch arrived within 1 s"):
        list(results)
    assert set(multiprocessing.active_children()) <= others


def test_only_waiting_counts_towards_the_timeout():
    workers = Workers(1)
    results = workers.read(Squares(), jobs(4, 1.0))  # a second for each batch
    squares = [next(results)[0].item()]
    workers.timeout = 2
    for _ in range(3):
        time.sleep(0.7)  # time of training, which does not count
        squares.append(next(results)[0].item())
    assert squares == [0, 1, 4, 9]
    workers.close()


@pytest.mark.parametrize(
    ("cores", "processes", "count", "beside_a_gpu"),
    [(1, 1, 0, 0), (2, 1, 1, 1), (6, 1, 2, 5), (64, 1, 8, 8), (16, 4, 1, 3), (2, 2, 0, 0)],
)
def test_the_default_leaves_a_core_to_each_training_process(monkeypatch, cores, processes, count, beside_a_gpu):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    for gpu, expected in ((False, count), (True, beside_a_gpu)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda gpu=gpu: gpu)
        assert default_count() == expected


# ---------------------------------------------------------------------------------------------------------------------
# Workers of a process that ends


@pytest.fixture
def program():
    """Return a function that starts a process that reads with two workers.

    The function returns the process, and a list of three process ids: those of the workers and that of their parent.
    """
    started: list[tuple[subprocess.Popen[str], list[int]]] = []

    def start(what: str) -> tuple[subprocess.Popen[str], list[int]]:
        process = subprocess.Popen(
            [sys.executable, "-m", "helpers.programs", "read_with_workers", what],
            env=child_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == 2
        started.append((process, [*pids, parent(pids[0])]))
        return started[-1]

    yield start
    for process, pids in started:  # processes that a failed test has left
        process.kill()
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate()


def status(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the name: state, parent, …; an empty list if there is no process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):  # the latter if it ends between opening and reading
        return []


def parent(pid: int) -> int:
    return int(status(pid)[1])


def left_after(pids: list[int], seconds: float) -> list[int]:
    end = time.monotonic() + seconds
    left = pids
    while left and time.monotonic() < end:
        left = [pid for pid in left if status(pid)[:1] not in ([], ["Z"])]
        time.sleep(0.02)
    return left


on_linux = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks into /proc")


@on_linux
def test_workers_ignore_signals_and_end_when_their_run_is_killed(program):
    process, pids = program("endless")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        for pid in pids:
            os.kill(pid, number)
    time.sleep(0.3)
    assert process.poll() is None
    assert left_after(pids, 0.1) == pids
    process.kill()
    assert left_after(pids, TIMEOUT_SECONDS) == []


@on_linux
def test_a_run_exits_with_its_workers_although_the_generator_is_open(program):
    process, pids = program("exit")
    assert process.wait(TIMEOUT_SECONDS) == 0
    assert left_after(pids, TIMEOUT_SECONDS) == []


# ---------------------------------------------------------------------------------------------------------------------
# Little shared memory, such as the 64 MB of Docker: each test mounts a /dev/shm


NAMESPACE = ["unshare", "--mount", *(["--map-root-user"] if os.getuid() else [])]
CAN_MOUNT = [*NAMESPACE, "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"]
can_mount = pytest.mark.skipif(
    shutil.which("unshare") is None or subprocess.run(CAN_MOUNT, capture_output=True, check=False).returncode != 0,
    reason="no file system can be mounted here",
)


def read(count: int, option: str) -> str:
    """Return what `read_megabytes COUNT` prints if /dev/shm is mounted with `option`."""
    mount = f"mount -t tmpfs -o {option} tmpfs /dev/shm"
    words = [*NAMESPACE, "sh", "-c", f'{mount} && exec "$0" -m helpers.programs read_megabytes {count}', sys.executable]
    options = {"env": child_environment(), "capture_output": True, "text": True, "timeout": TIMEOUT_SECONDS}
    ended = subprocess.run(words, check=True, **options)  # type: ignore[call-overload]
    return ended.stdout


@can_mount
def test_batches_are_read_if_those_that_are_loaded_in_advance_fit() -> None:
    assert read(12, "size=8m") == "12\n"


@can_mount
@pytest.mark.parametrize(
    ("option", "why"), [("size=256k", "it has no room for a batch"), ("ro", "data workers cannot be started: ")]
)
def test_too_little_shared_memory_is_an_error_with_a_remedy(option: str, why: str) -> None:
    said = read(12, option)  # two workers, each with two batches in advance
    assert said.startswith(f"/dev/shm: {why}")
    assert "docker run --shm-size=" in said
    assert "data.workers=0" in said
