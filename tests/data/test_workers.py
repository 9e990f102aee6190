"""Tests of data workers: the same results with any number of them, and errors if they die or hang."""

import itertools
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from helpers.command import TIMEOUT_SECONDS, child_environment, wait_until
from helpers.fake_cuda import simulate_accelerators

from runner.data.base import DataError
from runner.data.workers import Workers, default_count
from runner.system.trees import leaves_of


class Squares:
    """A loader of jobs (number, seconds, fate), which sleeps, and then returns (number², process, number of threads).

    But if `fate` is `raise`, it raises an error; if it is the name of a signal, it sends that to its process.
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
    """Return the child processes that earlier tests have left running, and check that the test leaves no others."""
    yield (before := set(multiprocessing.active_children()))
    assert set(multiprocessing.active_children()) <= before


@pytest.mark.parametrize("count", [0, 2])
def test_results_come_in_order_from_the_requested_number_of_processes(count, others):
    workers = Workers(count)
    results = torch.stack(list(workers.map(Squares(), jobs(20, 0.01))))
    assert results[:, 0].tolist() == [number**2 for number in range(20)]
    pids = set(results[:, 1].tolist())
    started = {process.pid for process in set(multiprocessing.active_children()) - others}
    assert (pids <= started, len(started)) == (True, 2) if count else pids == {os.getpid()}
    assert count == 0 or results[:, 2].tolist() == [1] * 20  # number of threads
    workers.close()


@pytest.mark.parametrize("count", [0, 2])
def test_jobs_are_requested_only_as_needed_and_an_error_is_raised_unchanged(count, others):
    asked, workers = [], Workers(count, ahead=3)

    def endless():
        for job in jobs(10**9, 0, {5: "raise"}):
            asked.append(job[0])
            yield job

    results = workers.map(Squares(), endless())
    assert len(list(itertools.islice(results, 5))) == 5
    assert len(asked) <= 5 + max(1, count * 3)
    with pytest.raises(ValueError, match="no square of 5"):
        next(results)
    workers.close()


def test_one_set_of_workers_serves_iterations_that_overlap_or_are_not_completed(others):
    workers = Workers(2)

    def squares() -> list[int]:
        return [int(result[0]) for result in workers.map(Squares(), jobs(8))]

    open_pass = workers.map(Squares(), jobs(100))
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


def batch_of(size: int) -> dict:
    """Return tensors of every kind, of which one has `size` numbers."""
    draw = torch.Generator().manual_seed(size)
    images = torch.rand(2, 3, 4, 4, generator=draw).to(memory_format=torch.channels_last)
    numbers = torch.rand(size, generator=draw)
    return {
        "numbers": numbers,
        "halves": [numbers.bfloat16(), numbers.half(), numbers.to(torch.complex64).conj()],
        "images": (images, images[:, :1], images[:0]),
        "others": {"whole": torch.arange(3), "scalar": torch.tensor(7), "true": torch.tensor([True]), "text": "a"},
        "sparse": torch.eye(3).to_sparse(),
    }


def test_a_worker_sends_small_and_large_tensors_of_every_kind_as_they_are(others):
    workers = Workers(1)
    sizes = [0, 5, 200_000]
    for sent, size in zip(workers.map(batch_of, iter(sizes)), sizes, strict=True):
        for (name, here), (_, there) in zip(leaves_of(batch_of(size)), leaves_of(sent), strict=True):
            if name == "others.text":
                assert there == "a"
            elif here.layout == torch.sparse_coo:
                assert here.to_dense().equal(there.to_dense())
            else:
                assert (there.dtype, there.stride(), there.shape) == (here.dtype, here.stride(), here.shape), name
                assert there.equal(here), name
        sent["numbers"].zero_()  # it is the receiver's
    workers.close()


def error_of(results: Iterator[torch.Tensor]) -> DataError:
    with pytest.raises(DataError) as raised:
        list(results)
    return raised.value


def send(number: signal.Signals, others: set[multiprocessing.Process]) -> None:
    for process in set(multiprocessing.active_children()) - others:
        os.kill(process.pid, number)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(("fate", "when"), [("SIGKILL", "idle"), ("SIGKILL", "loading"), ("SIGBUS", "loading")])
def test_a_killed_worker_raises_an_error_at_once(fate, when, others):
    workers = Workers(2, timeout=2 * TIMEOUT_SECONDS)
    if when == "idle":
        assert len(list(workers.map(Squares(), jobs(4)))) == 4
        send(signal.SIGKILL, others)
    error = error_of(workers.map(Squares(), jobs(1000, 0, {20: fate})))
    assert fate in error.why, "not the timeout"
    assert "data.workers=0" in error.remedy


@pytest.mark.parametrize("when", ["idle", "loading", "sending"])
def test_a_suspended_worker_raises_an_error_after_the_timeout(when, others):
    workers = Workers(2)
    asked = {"idle": jobs(4), "loading": jobs(1000, 0.01, {20: "SIGSTOP"}), "sending": jobs(10**5)}
    results = workers.map(Squares(), asked[when])
    assert next(results)[0] == 0
    if when == "idle":
        list(results)
    if when != "loading":  # perhaps before they have sent the memory of a batch
        send(signal.SIGSTOP, others)
    workers.timeout = 1  # set only after the workers have started, which may take long
    since = time.monotonic()
    error = error_of(workers.map(Squares(), jobs(4)) if when == "idle" else results)
    assert "no batch arrived within 1 s" in error.why
    assert "data.timeout" in error.remedy
    assert time.monotonic() - since > 1, "it was waited for"


def test_only_waiting_counts_towards_the_timeout():
    workers = Workers(1)
    results = workers.map(Squares(), jobs(4, 1.0))  # a second for each batch
    squares = [next(results)[0].item()]
    workers.timeout = 2
    for _ in range(3):
        time.sleep(0.7)  # time of training, which does not count
        squares.append(next(results)[0].item())
    assert squares == [0, 1, 4, 9]
    workers.close()


@pytest.mark.parametrize(
    ("cores", "processes", "count", "beside_a_gpu"),
    [(1, 1, 0, 0), (2, 1, 1, 1), (6, 1, 2, 5), (64, 1, 16, 16), (16, 4, 1, 3)],
)
def test_the_default_leaves_a_core_to_each_training_process(monkeypatch, cores, processes, count, beside_a_gpu):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    for gpu, expected in ((False, count), (True, beside_a_gpu)):
        simulate_accelerators(monkeypatch, int(gpu))
        assert default_count() == expected


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the latter if it ends between opening and reading
        return False


HAS_PROC = Path("/proc/self/stat").exists()


@pytest.mark.skipif(not HAS_PROC, reason="looks into /proc")
def test_workers_ignore_signals_and_end_with_a_run_that_is_killed():
    words = [sys.executable, "-m", "helpers.programs", "read_with_workers", "endless"]
    pids = []
    with subprocess.Popen(
        words, env=child_environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            pids = [int(pid) for pid in process.stdout.readline().split()]
            assert len(pids) == 2
            for number, pid in itertools.product((signal.SIGINT, signal.SIGTERM, signal.SIGUSR1), pids):
                os.kill(pid, number)
            time.sleep(0.3)
            assert process.poll() is None
            assert all(map(is_running, pids))
            process.kill()
            assert process.wait(TIMEOUT_SECONDS) == -signal.SIGKILL
            wait_until(lambda: not any(map(is_running, pids)))
        finally:
            process.kill()
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


NAMESPACE = ["unshare", "--mount", *(["--map-root-user"] if os.getuid() else [])]
CAN_MOUNT = [*NAMESPACE, "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"]


def test_too_little_shared_memory_is_an_error_with_a_remedy_and_workers_end_with_a_run_that_exits():
    cases = {  # two workers, each with two batches of 1 MB in advance
        "ro": "/dev/shm: data workers cannot be started: ",
        "size=256k": "/dev/shm: it has no room for a batch",
        "size=8m": "12\n",
    }
    words = [sys.executable, "-m", "helpers.programs", "read_megabytes", "12"]
    mounts = shutil.which("unshare") and subprocess.run(CAN_MOUNT, capture_output=True, check=False).returncode == 0
    if mounts:
        words = [*NAMESPACE, *words, *cases]
    printed = subprocess.check_output(words, env=child_environment(), text=True, timeout=TIMEOUT_SECONDS)
    printed, _, pids = printed.rpartition("workers ")
    assert len(pids.split()) == 2
    if HAS_PROC:
        wait_until(lambda: not any(is_running(int(pid)) for pid in pids.split()))
    if not mounts:
        pytest.skip("no file system can be mounted here")
    for option, text in zip(cases, printed.split("mounted with ")[1:], strict=True):
        assert text.startswith(f"{option}\n{cases[option]}")
        assert ("docker run --shm-size=" in text, "data.workers=0" in text) == (option != "size=8m",) * 2
