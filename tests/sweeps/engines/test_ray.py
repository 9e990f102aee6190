"""Tests of `sweep=ray`, with Ray on this machine."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import fake_run
from helpers.command import Command, processes_in, run_command, wait_until
from helpers.compose import TINY_CPU
from helpers.extras import require
from helpers.pool_jobs import exit_codes_of, job, processes, reports_of_job, wait_until_ended, wait_until_started

from runner.config.errors import ConfigError
from runner.sweeps.engines import cluster_task
from runner.sweeps.engines import ray as engine
from runner.sweeps.engines.base import Pool
from runner.sweeps.engines.ray import Ray

ray = require("ray")

pytestmark = pytest.mark.filterwarnings("default")  # Ray itself emits warnings


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Start Ray with two CPU cores and two GPUs, which need not exist."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        usual = {"log_to_driver": False, "include_dashboard": False, "object_store_memory": engine._OBJECT_STORE_BYTES}
        with engine._handlers_kept():
            ray.init("local", num_cpus=2, num_gpus=2, **usual)
        yield
        with engine._handlers_kept():
            ray.shutdown()


@pytest.fixture
def pool(cluster: None, tmp_path, monkeypatch) -> Iterator[Pool]:
    """A pool whose jobs run `fake_run`, which starts quickly, in `tmp_path`."""
    monkeypatch.setattr(cluster_task, "COMMAND", ("-S", fake_run.__file__))
    monkeypatch.chdir(tmp_path)
    with Ray().connect(9, tmp_path) as pool:
        yield pool
    wait_until(lambda: not processes(), what="a job is left")


def test_jobs_return_their_exit_codes_and_get_the_requested_threads_and_gpus(pool, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert pool.submit(job(0, "exit=3")) == "Ray, 1 core"
    assert pool.submit(job(1, "exit=2", gpus=1)) == "Ray, 1 core, 1 GPU"
    assert pool.submit(job(2, threads=2)) is None, "both cores are taken"
    assert exit_codes_of(pool, 0, 1) == {0: 3, 1: 2}
    assert pool.submit(job(2, "exit=75", threads=2)) == "Ray, 2 cores"
    assert exit_codes_of(pool, 2) == {2: 75}
    assert pool.submit(job(3, processes=2, gpus=2)) == "Ray, 2 cores, 2 GPUs"
    assert exit_codes_of(pool, 3) == {3: 0}
    saw = [reports_of_job(number)[0] for number in range(4)]
    assert [each["CUDA_VISIBLE_DEVICES"] for each in saw] in (["", gpu, "", "0,1"] for gpu in "01")
    assert [each["OMP_NUM_THREADS"] for each in saw] == ["1", "1", "2", "1"]
    assert {each["cwd"] for each in saw} == {os.getcwd()}


def test_stop_makes_a_running_job_save_and_a_waiting_job_never_start(pool):
    with Ray(slots=3, gpus=0).connect(3, Path.cwd()) as pool:
        for number in (0, 1):
            pool.submit(job(number, "until=go", f"saved=saved{number}", gpus=9))
        wait_until_started(pool, 0, 1)
        assert pool.submit(job(2, "saved=saved2")) is not None
        assert pool.submit(job(3)) is None
        pool.stop([0, 2])
        assert exit_codes_of(pool, 0, 2) == {0: 75, 2: 75}
        assert [path.name for path in Path.cwd().glob("saved*")] == ["saved0"]
        Path("go").touch()
        assert exit_codes_of(pool, 1) == {1: 0}, "the other one goes on"
        assert reports_of_job(2) == []


def test_killed_jobs_leave_no_process_and_do_not_save(cluster, pool):
    for number in (0, 1):
        pool.submit(job(number, "until=never", f"saved=saved{number}", "with_child"))
    wait_until_started(pool, 0, 1)
    assert len(processes()) >= 4
    pool.kill()
    wait_until(lambda: not processes(), what="a job is left")
    assert list(Path.cwd().glob("saved*")) == []
    assert pool.wait(0) == []
    assert pool.submit(job(2, "exit=3")) is not None, "the cores are free"
    assert exit_codes_of(pool, 2) == {2: 3}


def test_a_job_whose_worker_dies_is_lost_and_one_that_is_killed_tells_its_signal(pool):
    pool.submit(job(0, "until=never"))
    wait_until_started(pool, 0)
    os.kill(reports_of_job(0)[0]["parent"], signal.SIGKILL)
    lost = wait_until_ended(pool, 0)[0]
    assert lost.code is None
    assert "died" in lost.reason
    wait_until(lambda: not processes(), what="the command goes on")
    pool.submit(job(1, "until=never"))
    wait_until_started(pool, 1)
    os.kill(reports_of_job(1)[0]["pid"], signal.SIGSEGV)
    assert exit_codes_of(pool, 1) == {1: -signal.SIGSEGV}


@pytest.mark.parametrize("demand", [{"processes": 3}, {"threads": 3}, {"gpus": 3}])
def test_a_demand_that_no_machine_can_satisfy_is_refused(demand, pool):
    with pytest.raises(ConfigError, match=r"the largest has 2 and 2"):
        pool.submit(job(0, **demand))


RUN = (*TINY_CPU, "batch_size=8", "steps=2000", "save_every=100", "eval_every=0")


def start_sweep(cwd: Path, *words: str) -> Command:
    return Command(cwd, *RUN, "-m", "seed=1", "sweep=ray", *words)


def saved(command: Command) -> list[Path]:
    found = sorted(command.cwd.glob("outputs/sweeps/*/*/*/checkpoints/step_????????"))
    assert found or command.command_exit_code is None, command.console
    return found


def test_resume_of_a_stopped_sweep_is_bitwise_exact(tmp_path):
    command = start_sweep(tmp_path / "sweep")
    wait_until(lambda: saved(command))
    command.signal_processes(signal.SIGTERM)
    code, output = command.wait()
    assert code == 75, output
    last = saved(command)[-1].name
    assert last < "step_00002000"
    code, output = start_sweep(tmp_path / "sweep", "resume=auto").wait_for_all_processes()
    assert code == 0, output
    assert run_command(*RUN, "seed=1", cwd=tmp_path / "alone")[0] == 0
    [undisturbed] = tmp_path.glob("alone/outputs/*/*/checkpoints/step_00002000/model.safetensors")
    assert (saved(command)[-1] / "model.safetensors").read_bytes() == undisturbed.read_bytes(), "to the last bit"


def test_no_process_is_left_when_the_scheduler_is_killed(tmp_path):
    command = start_sweep(tmp_path / "sweep", "parallel=ddp", "steps=1000000")
    wait_until(lambda: saved(command))
    command.signal_processes(signal.SIGKILL)
    command.wait()
    commands = lambda: [words for words in processes_in(command.cwd).values() if not words.startswith("ray::")]  # noqa: E731
    wait_until(lambda: not commands(), what="a job is left")  # two agent processes of Ray itself exit a minute later


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://[::1]:1", "nowhere.invalid", "ray://nowhere.invalid:x"])
def test_an_address_that_cannot_be_reached_is_refused(address, tmp_path):
    with pytest.raises(ConfigError, match="it cannot be reached") as refusal, Ray(address=address).connect(2, tmp_path):
        pass
    assert (refusal.value.key, refusal.value.got) == ("sweep.address", address)
