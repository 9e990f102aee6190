"""Tests of the scheduler: which jobs it starts, in which order, and what it records in the ledger."""

import errno
import json
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers.fake_pool import FakePool

from runner.config.errors import ConfigError, check
from runner.storage.ledger_file import read_ledger
from runner.storage.run_directory import StorageError
from runner.sweeps import ledger as ledger_module
from runner.sweeps.display import Display
from runner.sweeps.engines.base import Engine, Job
from runner.sweeps.engines.local import Local
from runner.sweeps.ledger import Ledger, console_file
from runner.sweeps.scheduler import JobSource, Scheduler
from runner.system.signals import StopRequest


class FakeJobSource(JobSource):
    """A source of `count` jobs that differ only in their seed.

    Args:
        refused: the numbers of jobs whose config cannot run.
        keys: the `stack_key` of each job, if there are any.
    """

    def __init__(self, path: Path, count: int, refused: tuple[int, ...] = (), keys: Sequence[str] = ()):
        self.path, self.refused, self.keys = path, refused, keys
        self.told: list[tuple[int, int]] = []
        super().__init__(map(self.job, range(count)), count)

    def job(self, number: int) -> Job:
        overrides, refusal = [f"seed={number}"], "seed: got it: it is refused" if number in self.refused else ""
        about = {"directory": self.path / f"{number:03d}", "config_hash": f"hash {number}", "refusal": refusal}
        about |= {"stack_key": self.keys[number]} if self.keys else {}
        return Job(number, overrides, console_file(self.path, number), overrides=overrides, **about)

    def tell(self, number: int, code: int, result: dict[str, Any]) -> None:
        self.told.append((number, code))


@pytest.fixture
def ledger(tmp_path) -> Iterator[Ledger]:
    with Ledger(["seed=0,1,2,3"], tmp_path / "sweeps" / "a", "auto") as opened:
        yield opened


def run_scheduler(ledger: Ledger, jobs: FakeJobSource, pool: FakePool, options: Engine | None = None) -> list[int]:
    return Scheduler(jobs, pool, ledger, options or Local(), Display(len(jobs), ["seed"])).run(StopRequest())


def states(ledger: Ledger) -> list[str]:
    """Return the state of each job as recorded in the ledger file."""
    jobs = read_ledger(ledger.path)["jobs"]
    return [jobs[number]["state"] for number in sorted(jobs, key=int)]


@pytest.mark.parametrize(
    ("pool", "refused"), [(FakePool({1: [1]}, 1), ()), (FakePool({1: [3]}, 1), ()), (FakePool({}, 1), (1,))]
)
def test_fail_fast_starts_no_job_after_one_that_failed(pool, refused, ledger):
    codes = run_scheduler(ledger, FakeJobSource(ledger.path, 4, refused), pool, Local(fail_fast=True))
    assert codes[1] != 0
    assert len(codes) == 2, "jobs 2 and 3 have not begun"
    assert run_scheduler(ledger, FakeJobSource(ledger.path, 4), FakePool({}))[2:] == [0, 0], "without it, they go on"


@pytest.mark.parametrize("slots", [1, 9])
def test_each_job_runs_once_and_as_many_run_at_once_as_there_are_slots(slots, ledger):
    pool = FakePool({1: [3], 2: [2]}, slots)
    most: list[int] = []
    pool.on_wait = lambda: most.append(len(pool.running))
    jobs = FakeJobSource(ledger.path, 4)
    assert run_scheduler(ledger, jobs, pool) == [0, 3, 2, 0]
    assert pool.started == [0, 1, 2, 3]
    assert max(most) == min(slots, 4)
    assert sorted(jobs.told) == [(0, 0), (1, 3), (2, 2), (3, 0)]
    assert states(ledger) == ["done", "diverged", "refused", "done"]
    entry = read_ledger(ledger.path)["jobs"]["0"]
    assert (entry["slot"], entry["tries"], entry["directory"], entry["overrides"]) == ("a slot", 1, "000", ["seed=0"])
    assert read_ledger(ledger.path)["jobs"]["2"]["error"] == "it is job 2\nthe last words of job 2"


def test_jobs_with_the_same_key_start_together_and_one_that_crashed_starts_again(ledger):
    pool = FakePool({4: [1]}, 1, stack=3)
    jobs = FakeJobSource(ledger.path, 9, refused=(2,), keys=["a", "b", "a", "a", "a", "", "b", "a", "a"])
    assert run_scheduler(ledger, jobs, pool, Local(stack=3, retries=1)) == [0, 0, 2, *[0] * 6]
    # Of key `a`, the next that are left; job 2 is refused, job 4 crashes once, and 5 is only computed alone.
    assert pool.started == [(0, 3, 4), (1, 6), 5, (7, 8, 4)]
    assert states(ledger) == ["done", "done", "refused", *["done"] * 6]


def test_a_job_that_an_earlier_command_has_completed_is_not_started(ledger):
    ledger.update(0, config_hash="hash 0", code=0, state="done")
    ledger.update(1, config_hash="hash of another config", code=0, state="done")
    ledger.update(2, config_hash="hash 2", code=75, state="stopped")
    ledger.update(3, config_hash="hash 3", code=3, state="diverged")
    pool, jobs = FakePool({}), FakeJobSource(ledger.path, 4)
    assert run_scheduler(ledger, jobs, pool) == [0, 0, 0, 3]
    assert pool.started == [1, 2]
    assert {(0, 0), (3, 3)} <= {*jobs.told}


def test_a_job_that_can_never_run_is_refused_and_the_others_run(ledger, capsys):
    """Two because of their configs, with the same message, which is shown once, and one because of its demand."""

    class Small(FakePool):
        def submit(self, job: Job) -> str | None:
            check(job.number != 4, "sweep", "local", "job 4 needs more than there is", "use less")
            return super().submit(job)

    pool = Small({})
    assert run_scheduler(ledger, FakeJobSource(ledger.path, 6, refused=(1, 3)), pool) == [0, 2, 0, 2, 2, 0]
    assert pool.started == [0, 2, 5]
    assert read_ledger(ledger.path)["jobs"]["4"]["error"].startswith("sweep: got 'local': job 4 needs more")
    assert capsys.readouterr().err.count("seed: got it: it is refused") == 1


@pytest.mark.cases(
    (1, "the last words of job 1"),
    (-9, "was killed by SIGKILL"),
    (77, "ended with exit code 77"),
    (None, "was lost"),
    (0, "ended with exit code 0 before it was done"),
)
def test_a_crashed_job_is_started_again_as_often_as_retries_allows(code, text, ledger, capsys):
    ledger.update(1, config_hash="hash 1", code=75, state="stopped", tries=3)
    pool = FakePool({1: [code, code], 2: [code] * 3, 3: [2]})
    assert run_scheduler(ledger, FakeJobSource(ledger.path, 4), pool, Local(retries=2)) == [0, 0, 1, 2]
    assert sorted(pool.started) == [0, 1, 1, 1, 2, 2, 2, 3]
    jobs = read_ledger(ledger.path)["jobs"]
    assert [jobs[number]["tries"] for number in "0123"] == [1, 6, 3, 1], "earlier attempts do not use up the retries"
    assert jobs["2"]["error"] == text.replace("job 1", "job 2")
    assert capsys.readouterr().err.count("it will be started again") == 4


@pytest.mark.parametrize(("status", "code", "known"), [("crashed", 1, 1), ("diverged", 3, 3), ("diverged", 3, None)])
def test_the_result_tells_why_a_job_failed_and_how_it_ended_if_its_exit_code_is_unknown(
    status, code, known, ledger, capsys
):
    (ledger.path / "000").mkdir()
    result = {"status": status, "steps": 0, "error": "DataError: a.png is damaged\n  skip it"}
    (ledger.path / "000" / "result.json").write_text(json.dumps(result))
    assert run_scheduler(ledger, FakeJobSource(ledger.path, 1), FakePool({0: [known]})) == [code]
    assert read_ledger(ledger.path)["jobs"]["0"]["error"] == result["error"], "not the last words"
    assert (f"{result['error']}\n" in capsys.readouterr().err) == (status == "crashed")


def test_a_stop_signal_stops_the_running_jobs_and_no_more_jobs_start(ledger, capsys):
    pool, stop = FakePool({}), StopRequest()

    def receive() -> None:
        stop.received = "SIGTERM"

    pool.on_wait = receive
    scheduler = Scheduler(FakeJobSource(ledger.path, 5), pool, ledger, Local(retries=5), Display(5, ["seed"]))
    assert scheduler.run(stop) == [0, 75]
    assert pool.started == [0, 1]
    assert pool.stopped == {1}
    assert "SIGTERM: 1 running job saves and stops; press Ctrl-C to stop without saving" in capsys.readouterr().err


def test_the_ledger_records_which_jobs_run_and_tells_the_pool_where_a_killed_command_had_started_them(ledger):
    """The outcome of an earlier attempt is cleared: if the scheduler were killed now, the job would count as done."""
    ledger.update(0, config_hash="hash 0", state="running", slot="here", error="an error", seconds=1.0)
    ledger.update(1, config_hash="hash of another config", code=0, state="running", slot="there")
    ledger.update(2, config_hash="hash 2", state="stopped", slot="there", code=75)
    pool, seen = FakePool({}), []
    pool.on_wait = lambda: seen.append(read_ledger(ledger.path)["jobs"])
    assert run_scheduler(ledger, FakeJobSource(ledger.path, 3), pool) == [0, 0, 0]
    assert pool.earlier == [("here", False), ("there", True), ("", False)]
    assert [job["state"] for job in seen[0].values()] == ["running", "running", "stopped"]
    assert [job["state"] for job in seen[1].values()] == ["done", "running", "running"]
    assert not any({"code", "error", "seconds"} & seen[0][number].keys() for number in "01")


DISK_FULL, NOT_MEASURED = OSError(errno.ENOSPC, "No space left", "study.log"), ConfigError("a", 1, "b", "c")


@pytest.mark.parametrize("error", [DISK_FULL, NOT_MEASURED], ids=["disk", "config"])
@pytest.mark.parametrize("where", ["next", "tell", "write"])
def test_a_ledger_or_a_study_that_cannot_be_written_stops_the_sweep(where, error, ledger, monkeypatch):
    def fail(*_: object) -> Any:
        raise error

    class Failing(FakeJobSource):
        def job(self, number: int) -> Job:
            return fail() if where == "next" and number == 2 else super().job(number)

    jobs, pool = Failing(ledger.path, 4), FakePool({}, slots=2)
    owner, name = (jobs, "tell") if where == "tell" else (ledger_module, "write_text")
    pool.on_wait = lambda: None if where == "next" else monkeypatch.setattr(owner, name, fail)
    file = "sweep.json" if where == "write" else "study.log"
    with pytest.raises((StorageError, ConfigError), match=f"{file} cannot be written: No space left|a: got 1: b"):
        run_scheduler(ledger, jobs, pool)
    assert pool.running == []
    assert pool.stopped == ({0, 1} if where == "next" else {1}), "job 0 had ended"


def test_unpromising_jobs_are_stopped_and_may_continue_later(ledger):
    class Search(FakeJobSource):
        def unpromising(self, running: Collection[int]) -> list[int]:
            return [1] if self.told == [(0, 0)] and 1 in running else []

        def next(self) -> Job | None:
            if self.told[1:] == [(1, 75)] and not seen:
                seen.append(states(ledger))
                return self.job(1)
            return super().next()

    pool, seen = FakePool({}), []
    source = Search(ledger.path, 2)
    assert run_scheduler(ledger, source, pool) == [0, 0]
    assert pool.started == [0, 1, 1]
    assert source.told == [(0, 0), (1, 75), (1, 0)]
    assert seen == [["done", "pruned"]]
    assert states(ledger) == ["done", "done"]
    ledger.end(len(ledger.settled_states) == 2)
    assert read_ledger(ledger.path)["complete"]
