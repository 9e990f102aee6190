"""Tests of `sweep=local`: the cores and GPUs that each job gets, and how jobs are stopped and killed."""

import fcntl
import os
import signal
from collections.abc import Iterator
from multiprocessing import active_children, forkserver
from pathlib import Path
from unittest import mock

import pytest
from helpers.command import wait_until
from helpers.compose import TINY_CPU
from helpers.pool_jobs import exit_codes_of

from runner.config.errors import ConfigError
from runner.storage.files import is_locked
from runner.storage.run_directory import read_result
from runner.sweeps.engines import local
from runner.sweeps.engines.base import Demand, Ended, Job, Pool
from runner.sweeps.engines.local import Local, LocalPool
from runner.sweeps.engines.slurm import Slurm


@pytest.fixture
def pool(tmp_path) -> Iterator[Pool]:
    with Local().connect(2, tmp_path) as pool:
        yield pool


def job(tmp_path: Path, number: int, *arguments: str, **demand: int) -> Job:
    words, directory = (
        [*TINY_CPU, *arguments, f"--run-directory={tmp_path / str(number)}"],
        Path(f"00{number}-a.lr=0.1"),
    )
    return Job(number, words, tmp_path / f"{number}.txt", Demand(**demand), directory=directory)


def test_jobs_run_concurrently_as_commands_and_print_to_their_files(pool, tmp_path):
    for number, word in enumerate(("steps=1000000", "optimizer.lrr=1")):
        assert pool.submit(job(tmp_path, number, word)) is not None
    assert exit_codes_of(pool, 1) == {1: 2}
    [process] = [each for each in active_children() if each.name == "000-lr=0.1"]
    if (name := Path(f"/proc/{process.pid}/comm")).exists():
        assert name.read_text() == "000-lr=0.1\n", "what ps shows"
    os.kill(process.pid or 0, signal.SIGSEGV)
    assert exit_codes_of(pool, 0) == {0: -signal.SIGSEGV}
    assert (tmp_path / "1.txt").read_text() == "optimizer.lrr: there is no such key;\n  did you mean optimizer.lr?\n"


def test_a_stopped_job_saves_and_a_killed_job_ends_with_its_ranks_and_does_not(pool, tmp_path):
    pool.submit(job(tmp_path, 0, "steps=1000000", "save_every=5"))
    pool.submit(job(tmp_path, 1, "steps=1000000", "save_every=5", "parallel=ddp"))
    wait_until(lambda: all(list((tmp_path / n / "checkpoints").glob("step_*")) for n in "01"))
    assert is_locked(tmp_path / "0.txt")
    pool.stop([0])
    assert exit_codes_of(pool, 0) == {0: 75}
    assert not is_locked(tmp_path / "0.txt")
    assert is_locked(tmp_path / "1.txt"), "the other one goes on"
    pool.kill()
    wait_until(lambda: not is_locked(tmp_path / "1.txt"), what="a rank is left")
    assert not (tmp_path / "1" / "result.json").exists()


def test_jobs_go_on_when_the_fork_server_is_killed(pool, tmp_path):
    for number, steps in enumerate((2, 1000000)):
        pool.submit(job(tmp_path, number, f"steps={steps}", "save_every=5"))
    server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    os.kill(server, signal.SIGSTOP)  # both are forked, and it cannot tell how the first one ends
    wait_until(lambda: (tmp_path / "0" / "result.json").exists() and not is_locked(tmp_path / "0.txt"))
    wait_until(lambda: list((tmp_path / "1" / "checkpoints").glob("step_*")))  # before its first step, none is saved
    os.kill(server, signal.SIGKILL)
    assert exit_codes_of(pool, 0) == {0: None}, "the result in its directory tells"
    assert pool.wait(0) == []
    assert pool.submit(job(tmp_path, 2, processes=1024)) is None, "the second job still has its core"
    pool.stop([1])
    assert exit_codes_of(pool, 1) == {1: None}
    assert read_result(tmp_path / "1")["status"] == "stopped"
    pool.submit(job(tmp_path, 2, "steps=2"))
    assert exit_codes_of(pool, 2) == {2: 0}
    assert read_result(tmp_path / "2")["status"] == "done"
    assert "done after step 2/2" in (tmp_path / "2.txt").read_text()


def test_a_job_that_a_killed_command_left_running_is_waited_for(pool, tmp_path):
    console = tmp_path / "0.txt"
    with console.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # as the earlier process holds it
        pool.submit(job(tmp_path, 0, "steps=2"))
        assert pool.wait(0.3) == []
        pool.stop([0])
        assert exit_codes_of(pool, 0) == {0: 75}
        pool.submit(job(tmp_path, 0, "steps=2"))
        assert pool.wait(0.3) == []
    assert exit_codes_of(pool, 0) == {0: 0}


@pytest.fixture
def machine(monkeypatch) -> dict[str, list]:
    """A fake machine with 8 cores, which starts nothing. A test sets its GPUs."""
    has: dict[str, list] = {"gpus": [], "started": []}

    def process(args: tuple, **_: object) -> mock.Mock:
        has["started"].append(mock.Mock(args=args, pid=1, exitcode=None))
        return has["started"][-1]

    monkeypatch.setattr(local, "usable_core_numbers", lambda: list(range(8)))
    monkeypatch.setattr(local, "visible_gpus", lambda: list(has["gpus"]))
    monkeypatch.setattr(local, "get_context", lambda method: mock.Mock(Process=process))
    monkeypatch.setattr(local, "wait", lambda sentinels, seconds: None)
    return has


def submitted(pool: LocalPool, *demands: Demand) -> list[str | None]:
    return [pool.submit(Job(n, [], Path("console"), demand)) for n, demand in enumerate(demands)]


@pytest.mark.cases(
    (("auto", "auto", 20), [Demand()] * 9, ["1 core"] * 8 + [None]),
    (("auto", "auto", 2), [Demand()] * 2, ["4 cores"] * 2),
    (("auto", 3, 20), [Demand()] * 3, ["3 cores", "3 cores", None]),
    ((2, "auto", 20), [Demand()] * 3, ["4 cores", "4 cores", None]),
    ((1, "auto", 20), [Demand()] * 2, ["8 cores", None]),
    (("auto", "auto", 20), [Demand(processes=3), Demand(processes=6), Demand()], ["3 cores", None, "1 core"]),
    (("auto", "auto", 20), [Demand(threads=99), Demand()], ["8 cores", None]),
    (("auto", 2, 20), [Demand(processes=2), Demand(threads=1)], ["4 cores", "1 core"]),
)
def test_the_cores_are_divided_among_the_jobs(options, demands, wanted, machine):
    assert submitted(LocalPool(*options), *demands) == wanted
    used = [core for each in machine["started"] for core in each.args[2]]
    assert len(used) == len(set(used)), "a core has one job"


def test_each_job_has_gpus_of_its_own(machine):
    machine["gpus"] = ["0", "1", "3"]
    pool = LocalPool("auto", "auto", 20)
    demands = Demand(gpus=2), Demand(gpus=2), Demand(gpus=1), Demand(gpus=1), Demand()
    assert submitted(pool, *demands) == ["GPU 0,1", None, "GPU 3", None, "1 core"]
    assert [each.args[4]["CUDA_VISIBLE_DEVICES"] for each in machine["started"]] == ["0,1", "3", ""]
    machine["started"][0].exitcode = 0
    assert pool.wait(0) == [Ended(0, 0)]
    assert submitted(pool, Demand(gpus=1)) == ["GPU 0"]
    with pytest.raises(ConfigError, match="3 GPUs are visible, and job 0 needs 4"):
        submitted(pool, Demand(gpus=4))


@pytest.mark.cases(
    (Local, {"trials": 3}, "trials"),
    (Slurm, {"signal_seconds": 10**6}, "signal_seconds"),
)
def test_options_of_an_engine_that_do_not_fit_together_are_refused(kind, options, key):
    with pytest.raises(ConfigError) as refusal:
        kind(**options)
    assert refusal.value.key == key
