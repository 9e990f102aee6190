"""The scheduler: which jobs are started when, and what the ledger says of them."""

from __future__ import annotations

import errno
import fcntl
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from helpers.command import PATIENCE

from runner.cli.exit_codes import CODES
from runner.config.errors import check
from runner.storage.run_directory import StorageError
from runner.sweep.display import Display
from runner.sweep.engines.base import Ended, Engine, Job, Pool, Started
from runner.sweep.engines.local import Local
from runner.sweep.ledger import Ledger
from runner.sweep.ledger_file import read_ledger
from runner.sweep.scheduler import (
    STATES,
    JobSource,
    PlannedJob,
    Scheduler,
    how_it_died,
    is_open_in,
    is_running,
    message,
)
from runner.system.signals import StopRequest


class Jobs(JobSource):
    """Jobs without swept values.

    Args:
        refused: the numbers of jobs whose config cannot run.
        one_by_one: yield a job only when the one before it has ended.
    """

    def __init__(self, path: Path, count: int, refused: tuple[int, ...] = (), one_by_one: bool = False):
        self.path, self.count, self.refused, self.one_by_one = path, count, refused, one_by_one
        self.told: list[tuple[int, int]] = []
        self.num_yielded = 0

    def __len__(self) -> int:
        return self.count

    def next(self) -> PlannedJob | None:
        number = self.num_yielded
        if number == self.count or (self.one_by_one and len(self.told) < number):
            return None
        self.num_yielded += 1
        overrides, refusal = [f"seed={number}"], "seed: got it: it is refused" if number in self.refused else ""
        return PlannedJob(number, overrides, overrides, self.path / f"{number:03d}", f"hash {number}", refusal=refusal)

    def tell(self, number: int, code: int, result: dict[str, Any]) -> None:
        self.told.append((number, code))


class FakePool(Pool):
    """Jobs end in the order in which they were started, one in each wait.

    Args:
        codes: the exit codes of a job's attempts, by its number; 0 if there are none left.
        slots: how many jobs run at once.
    """

    def __init__(self, codes: dict[int, list[int | None]], slots: int = 2):
        self.codes, self.slots = codes, slots
        self.running: list[int] = []
        self.started: list[int] = []
        self.stopped: set[int] = set()
        self.on_wait: Callable[[], None] = lambda: None

    def submit(self, job: Job) -> Started | None:
        if len(self.running) == self.slots:
            return None
        assert job.number not in self.running
        job.console.write_text(f"it is job {job.number}\nthe last words of job {job.number}\n")
        self.running.append(job.number)
        self.started.append(job.number)
        return Started("a slot", 0)

    def wait(self, seconds: float) -> list[Ended]:
        self.on_wait()
        if not self.running:
            return []
        number = self.running.pop(0)
        return [Ended(number, 75 if number in self.stopped else (self.codes.get(number) or [0]).pop(0))]

    def stop(self, numbers: list[int]) -> None:
        self.stopped |= set(numbers)

    def kill(self) -> None: ...


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with ExitStack() as stack:
        yield stack.enter_context(Ledger(["seed=0,1,2,3"], tmp_path / "sweeps" / "a", "auto"))


def scheduled(ledger: Ledger, jobs: Jobs, pool: Pool, options: Engine | None = None) -> list[int]:
    return Scheduler(jobs, pool, ledger, options or Local(), Display(len(jobs), ["seed"])).run(StopRequest())


def states(ledger: Ledger) -> list[str]:
    """What the file says of each job."""
    jobs = read_ledger(ledger.path)["jobs"]
    return [jobs[number]["state"] for number in sorted(jobs, key=int)]


def test_every_exit_code_of_the_command_has_its_state() -> None:
    assert {STATES[code]: code for code in CODES.values()} == CODES


@pytest.mark.parametrize("slots", [1, 2, 9])
def test_all_jobs_run_once_as_many_at_once_as_there_is_room_for(slots: int, ledger: Ledger) -> None:
    pool = FakePool({1: [3], 2: [2]}, slots)
    most: list[int] = []
    pool.on_wait = lambda: most.append(len(pool.running))
    jobs = Jobs(ledger.path, 4)
    assert scheduled(ledger, jobs, pool) == [0, 3, 2, 0]
    assert pool.started == [0, 1, 2, 3]
    assert max(most) == min(slots, 4)
    assert sorted(jobs.told) == [(0, 0), (1, 3), (2, 2), (3, 0)]
    assert states(ledger) == ["done", "diverged", "refused", "done"]
    entry = read_ledger(ledger.path)["jobs"]["0"]
    assert (entry["slot"], entry["tries"], entry["directory"], entry["overrides"]) == ("a slot", 1, "000", ["seed=0"])
    assert read_ledger(ledger.path)["jobs"]["2"]["error"] == "it is job 2\nthe last words of job 2"


def test_jobs_that_depend_on_results_are_waited_for(ledger: Ledger) -> None:
    pool = FakePool({}, slots=4)
    assert scheduled(ledger, Jobs(ledger.path, 3, one_by_one=True), pool) == [0, 0, 0]


def test_the_ledger_says_what_runs_while_it_runs(ledger: Ledger) -> None:
    pool = FakePool({})
    seen: list[list[str]] = []
    pool.on_wait = lambda: seen.append(states(ledger))
    scheduled(ledger, Jobs(ledger.path, 2), pool)
    assert seen == [["running", "running"], ["done", "running"]]


def test_a_job_that_an_earlier_command_has_completed_is_not_started(ledger: Ledger) -> None:
    ledger.update(0, config_hash="hash 0", code=0, state="done")
    ledger.update(1, config_hash="hash of another config", code=0, state="done")
    ledger.update(2, config_hash="hash 2", code=75, state="stopped")
    pool, jobs = FakePool({}), Jobs(ledger.path, 3)
    assert scheduled(ledger, jobs, pool) == [0, 0, 0]
    assert pool.started == [1, 2]
    assert (0, 0) in jobs.told


def test_a_config_that_cannot_run_needs_no_process(ledger: Ledger, capsys: pytest.CaptureFixture[str]) -> None:
    pool = FakePool({})
    assert scheduled(ledger, Jobs(ledger.path, 4, refused=(1, 3)), pool) == [0, 2, 0, 2]
    assert pool.started == [0, 2]
    assert capsys.readouterr().err.count("seed: got it: it is refused") == 1


@pytest.mark.parametrize(
    ("code", "text"), [(1, "the last words of job 1"), (-9, "was killed by SIGKILL"), (None, "was lost")]
)
def test_a_crashed_job_is_started_again_as_often_as_asked(
    code: int | None, text: str, ledger: Ledger, capsys: pytest.CaptureFixture[str]
) -> None:
    pool = FakePool({1: [code, code], 2: [code] * 3, 3: [2]})
    assert scheduled(ledger, Jobs(ledger.path, 4), pool, Local(retries=2)) == [0, 0, 1, 2]
    assert sorted(pool.started) == [0, 1, 1, 1, 2, 2, 2, 3]
    jobs = read_ledger(ledger.path)["jobs"]
    assert [jobs[number]["tries"] for number in "0123"] == [1, 3, 3, 1]
    assert jobs["2"]["error"] == text.replace("job 1", "job 2")
    assert capsys.readouterr().err.count("it is started again") == 4


@pytest.mark.parametrize("code", [1, 2])
def test_a_failure_can_stop_the_sweep(code: int, ledger: Ledger) -> None:
    pool = FakePool({0: [code]})
    assert scheduled(ledger, Jobs(ledger.path, 4), pool, Local(on_failure="stop")) == [code, 75]
    assert pool.started == [0, 1]
    assert states(ledger)[1] == "stopped"


def test_a_job_that_can_never_run_is_refused_and_the_others_run(ledger: Ledger) -> None:
    class Small(FakePool):
        def submit(self, job: Job) -> Started | None:
            check(job.number != 1, "sweep", "local", "job 1 needs more than there is", "use less")
            return super().submit(job)

    pool = Small({})
    assert scheduled(ledger, Jobs(ledger.path, 3), pool) == [0, 2, 0]
    assert read_ledger(ledger.path)["jobs"]["1"]["error"].startswith("sweep: got 'local': job 1 needs more")


def test_a_signal_lets_the_running_jobs_stop_and_starts_no_more(ledger: Ledger) -> None:
    pool, stop = FakePool({}), StopRequest()

    def receive() -> None:
        stop.received = "SIGTERM"

    pool.on_wait = receive
    scheduler = Scheduler(Jobs(ledger.path, 5), pool, ledger, Local(retries=5), Display(5, ["seed"]))
    assert scheduler.run(stop) == [0, 75]
    assert pool.started == [0, 1]
    assert pool.stopped == {1}


def test_a_ledger_that_cannot_be_written_any_more_stops_the_sweep(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    pool = FakePool({})
    pool.on_wait = lambda: monkeypatch.setattr("runner.sweep.ledger.write_text", fail)
    with pytest.raises(StorageError) as caught:
        scheduled(ledger, Jobs(ledger.path, 5), pool)
    assert caught.value.path == ledger.path / "sweep.json"
    assert pool.running == []
    assert pool.stopped == {1}, "job 0 had ended"


def test_a_job_that_a_killed_scheduler_left_running_is_waited_for(ledger: Ledger, tmp_path: Path) -> None:
    ledger.update(0, config_hash="hash 0", state="running", pid=0, started=0.0, tries=1)
    console, directory = ledger.console(0), ledger.path / "000"
    console.parent.mkdir()
    directory.mkdir()
    pool = FakePool({}, slots=1)
    with console.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert is_running(console)

        def end() -> None:
            (directory / "result.json").write_text(json.dumps({"status": "diverged", "steps": 3}))
            fcntl.flock(file, fcntl.LOCK_UN)

        pool.on_wait = end
        assert scheduled(ledger, Jobs(ledger.path, 2), pool) == [3, 0]
    assert pool.started == [1]
    assert states(ledger) == ["diverged", "done"]


def test_a_stop_reaches_the_process_that_prints_to_the_file_and_no_other(ledger: Ledger) -> None:
    """Whatever process id the ledger names: somebody else may have written it."""
    console, directory = ledger.console(0), ledger.path / "000"
    console.parent.mkdir()
    directory.mkdir()
    words = [sys.executable, "-c", "import time; print(flush=True); time.sleep(300)"]
    with console.open("w") as file:
        own, other = subprocess.Popen(words, stdout=file), subprocess.Popen(words, stdout=subprocess.DEVNULL)
    try:
        assert is_open_in(own.pid, console)
        assert not is_open_in(other.pid, console)
        for process, wanted in ((own, -signal.SIGTERM), (other, None)):
            ledger.update(0, config_hash="hash 0", state="running", pid=process.pid, started=0.0, tries=1)
            stop, pool = StopRequest(), FakePool({})
            with console.open("r+") as held:
                fcntl.flock(held, fcntl.LOCK_EX)
                waits = iter(
                    [lambda stop=stop: setattr(stop, "received", "SIGTERM"), lambda: fcntl.flock(held, fcntl.LOCK_UN)]
                )
                pool.on_wait = lambda waits=waits: next(waits, lambda: None)()
                Scheduler(Jobs(ledger.path, 1), pool, ledger, Local(), Display(1, ["seed"])).run(stop)
            with suppress(subprocess.TimeoutExpired):
                process.wait(PATIENCE if wanted else 0.1)
            assert process.returncode == wanted
    finally:
        for process in (own, other):
            process.kill()
            process.wait()


def test_how_a_job_died() -> None:
    assert how_it_died(Ended(0, -signal.SIGSEGV)) == "was killed by SIGSEGV"
    assert how_it_died(Ended(0, 77)) == "ended with exit code 77"
    assert how_it_died(Ended(0, None, "node 3 is down")) == "was lost: node 3 is down"


def test_the_last_lines_of_a_file(tmp_path: Path) -> None:
    assert message(tmp_path / "missing") == ""
    path = tmp_path / "console"
    path.write_bytes(b"x" * 50_000 + b"\n\n" + b"".join(b"line %d \xff\n" % number for number in range(20)))
    assert message(path).splitlines() == [f"line {number} \ufffd" for number in range(10, 20)]
