"""Tests of `sweep=slurm`, with a fake SLURM (`helpers.fake_slurm`)."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import fake_run
from helpers.command import STEP_GATE_PYTHONPATH, Command, run_command, wait_until
from helpers.compose import TINY_CPU
from helpers.fake_slurm import ACTIVE_STATES, FakeSlurm
from helpers.pool_jobs import exit_codes_of, job, processes, reports_of_job, wait_until_ended, wait_until_started

from runner.config.errors import ConfigError
from runner.sweeps.engines import base, cluster_task, ray, slurm
from runner.sweeps.engines.base import Ended, Pool
from runner.sweeps.engines.ray import Ray
from runner.sweeps.engines.slurm import Slurm, SlurmPool, cancel


@pytest.fixture
def cluster(tmp_path, monkeypatch) -> Iterator[FakeSlurm]:
    """A fake cluster whose jobs run `fake_run`, which starts quickly, in the current directory."""
    cluster = FakeSlurm(tmp_path / "cluster")
    for name, value in cluster.variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(cluster_task, "COMMAND", ("-S", fake_run.__file__))
    for name in ("_ASK_SECONDS", "_ASK_AGAIN_SECONDS", "_SUBMIT_AGAIN_SECONDS"):
        monkeypatch.setattr(slurm, name, 0.1)
    (tmp_path / "sweep").mkdir()
    monkeypatch.chdir(tmp_path / "sweep")
    yield cluster
    cluster.close()
    wait_until(lambda: not processes(), what="a job is left")


@pytest.fixture
def pool(cluster: FakeSlurm) -> Iterator[Pool]:
    with Slurm(threads=2).connect(9, Path.cwd()) as pool:
        yield pool


def test_jobs_with_the_same_demand_form_one_array_and_get_what_they_request(pool, cluster, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    for number, code in enumerate((0, 3, 2)):
        assert pool.submit(job(number, f"exit={code}")) is not None
    pool.submit(job(3, "exit=75", processes=2, gpus=2, threads=3))
    assert exit_codes_of(pool, 0, 1, 2, 3) == {0: 0, 1: 3, 2: 2, 3: 75}
    options = [each["options"] for each in cluster.jobs.values()]
    assert list(cluster.jobs) == ["101_0", "101_1", "101_2", "102"]
    assert [each.get("array") for each in options] == [*["0-2%3"] * 3, None]
    assert [(each["cpus-per-task"], each.get("gpus-per-node")) for each in options[2:]] == [("2", None), ("6", "2")]
    for number, (threads, gpus) in enumerate([("2", "")] * 3 + [("3", "0,1")]):
        [saw] = reports_of_job(number)
        assert (saw["OMP_NUM_THREADS"], saw["CUDA_VISIBLE_DEVICES"]) == (threads, gpus)
        assert saw["cwd"] == os.getcwd()
        assert [saw[name] for name in fake_run.REPORTED_VARIABLES if name.startswith("SLURM")] == [None] * 3, (
            "no launcher's variables"
        )
    assert Path("1.txt").read_text().startswith("SLURM job 101_1 on ")


def test_a_job_that_is_preempted_or_reaches_its_time_limit_saves_and_is_requeued(cluster):
    with Slurm(slots=2).connect(3, Path.cwd()) as pool:
        for number in (0, 1):
            assert pool.submit(job(number, "exit=3", "until=never", f"saved=saved{number}")) is not None
        assert pool.submit(job(2)) is None, "slots limits the number of jobs in the queue"
        wait_until_started(pool, 0, 1)
        cluster.signal("101_0", signal.SIGUSR2)
        cluster.signal("101_1", signal.SIGTERM, signal.SIGCONT, signal.SIGUSR2)
        assert exit_codes_of(pool, 0, 1) == {0: 3, 1: 3}, "not 75: they go on"
        assert pool.submit(job(2)) is not None
    for number in (0, 1):
        assert [saw["resumed"] for saw in reports_of_job(number)] == [False, True]
    assert [(each["starts"], each["options"]["array"]) for each in cluster.jobs.values()] == [(2, "0-1%2")] * 2
    assert len(cluster.calls("sbatch")) == 1


def test_stop_makes_running_jobs_save_and_cancels_waiting_jobs(pool, cluster):
    for number in (0, 1):
        pool.submit(job(number, "until=never", f"saved=saved{number}"))
    wait_until_started(pool, 0, 1)
    cluster.hold()
    pool.submit(job(2, "saved=saved2"))
    wait_until(lambda: (pool.wait(0.05), "102" in cluster.jobs)[1])
    pool.submit(job(3, "saved=saved3"))
    pool.stop([0, 2, 3])
    assert exit_codes_of(pool, 0, 2, 3) == {0: 75, 2: 75, 3: 75}
    assert [path.name for path in Path.cwd().glob("saved*")] == ["saved0"]
    assert cluster.jobs["101_0"]["starts"] == 1, "it is not requeued"
    assert cluster.jobs["102"]["state"] == "CANCELLED"
    assert cluster.jobs.keys() == {"101_0", "101_1", "102"}, "the last one has not been submitted"
    cluster.end("101_1", "NODE_FAIL")
    assert wait_until_ended(pool, 1)[1].reason == "SLURM says NODE_FAIL"


def test_killed_jobs_leave_no_process_and_do_not_save(cluster):
    with Slurm().connect(2, Path.cwd()) as pool:
        for number in (0, 1):
            pool.submit(job(number, "until=never", f"saved=saved{number}", "with_child"))
        wait_until_started(pool, 0, 1)
    wait_until(lambda: not processes(), what="a job is left")
    assert list(Path.cwd().glob("saved*")) == []
    assert [each["state"] in ACTIVE_STATES for each in cluster.jobs.values()] == [False, False]


def test_a_later_command_adopts_the_jobs_of_a_killed_scheduler(cluster):
    earlier = SlurmPool(Slurm(), Path.cwd())
    words = (("exit=3",), ("until=go", "exit=3"), ("exit=75",), ("until=never",), ("until=never",))
    slots = [earlier.submit(job(number, *each)) or "" for number, each in enumerate(words)]
    wait_until_started(earlier, 1, 3, 4)
    wait_until(lambda: all(cluster.jobs[f"101_{index}"]["state"] == "COMPLETED" for index in (0, 2)))
    with Slurm().connect(5, Path.cwd()) as pool:
        again = [pool.submit(job(number, "exit=2", earlier=each)) for number, each in enumerate(slots[:4])]
        assert [slot == each for slot, each in zip(again, slots, strict=False)] == [True, True, False, True]
        assert pool.submit(job(4, "exit=3", earlier=slots[4], is_changed=True)) != slots[4]
        assert exit_codes_of(pool, 0, 2, 4) == {0: 3, 2: 2, 4: 3}, "the first one has ended in the meantime"
        wait_until(lambda: cluster.jobs["101_4"]["state"] not in ACTIVE_STATES)  # stopped, as its config has changed
        Path("go").touch()
        assert exit_codes_of(pool, 1) == {1: 3}
        pool.stop([3])
        assert exit_codes_of(pool, 3) == {3: 75}
    assert [each["starts"] for each in cluster.jobs.values()] == [1] * 7, "nothing that has a result is run twice"


def test_only_handles_of_running_jobs_of_this_sweep_are_taken_over(pool, cluster, tmp_path):
    slot = pool.submit(job(0, "until=never"))
    assert slot is not None
    wait_until_started(pool, 0)
    token = cluster.jobs["101"]["options"]["job-name"].rpartition("-")[2]
    assert slot == f"slurm {token}_0"
    others = ("core 0", "slurm 101", "slurm 101_0", "slurm {}", "slurm {}_1", "slurm {}_0 ", "slurm ../{}_0")
    later = SlurmPool(Slurm(), Path.cwd())
    for number, text in enumerate(others, start=1):
        earlier = text.format(token)
        assert later.submit(job(number, earlier=earlier)) != earlier
    assert later.submit(job(0, earlier=slot)) == slot
    assert later.submit(job(9, earlier=slot)) != slot, "it is one job"
    elsewhere = SlurmPool(Slurm(), tmp_path / "copied" / "sweep")
    assert elsewhere.submit(job(0, earlier=slot)) != slot


def test_a_cluster_that_does_not_answer_or_rejects_the_first_jobs_is_a_config_error(cluster):
    cluster.fail("squeue", 1, err="slurm_load_jobs error: Unable to contact slurm controller")
    with pytest.raises(ConfigError, match=r"squeue failed: .*Unable to contact slurm controller"):
        Slurm().connect(1, Path.cwd())
    pool = Slurm().connect(1, Path.cwd())
    cluster.fail("sbatch", 1, err="sbatch: error: invalid partition specified: gpu\n")
    pool.submit(job(0))
    with pytest.raises(ConfigError, match=r"sbatch has not accepted the jobs: .*invalid partition specified: gpu"):
        pool.wait(0)


def test_later_jobs_are_submitted_again_before_they_count_as_lost(pool, cluster):
    pool.submit(job(0))
    assert exit_codes_of(pool, 0) == {0: 0}
    cluster.fail("sbatch", 1, out="what?\n", code=0)
    pool.submit(job(1))
    assert exit_codes_of(pool, 1) == {1: 0}
    cluster.fail("sbatch", 9, err="sbatch: error: Socket timed out")
    pool.submit(job(2))
    lost = wait_until_ended(pool, 2)[2]
    assert lost.code is None
    assert "Socket timed out" in lost.reason


def test_no_job_is_lost_while_squeue_fails(pool, cluster):
    pool.submit(job(0, "until=go", "exit=3"))
    wait_until_started(pool, 0)
    for out, code in (("<html>\n", 0), ("", 1)):
        before = len(cluster.calls("squeue"))
        cluster.fail("squeue", 4, out=out, code=code)
        wait_until(lambda before=before: pool.wait(0.05) == [] and len(cluster.calls("squeue")) > before + 5)
    Path("go").touch()
    assert exit_codes_of(pool, 0) == {0: 3}


def test_jobs_that_end_without_an_exit_code_are_lost_unless_they_were_canceled(pool, cluster):
    for number in range(4):
        pool.submit(job(number, "until=never"))
    wait_until_started(pool, 0, 1, 2, 3)
    cancel(["101_0"])
    cluster.end("101_1", "OUT_OF_MEMORY")
    cluster.end("101_2", "OUT_OF_MEMORY", forgotten=True)
    cluster.signal("101_3", signal.SIGKILL)
    pid = reports_of_job(3)[0]["pid"]
    wait_until(lambda: pid not in processes(), what="a command goes on without its task")
    assert wait_until_ended(pool, 0, 1, 2, 3) == {
        0: Ended(0, 75, ""),
        1: Ended(1, None, "SLURM says OUT_OF_MEMORY"),
        2: Ended(2, None, "SLURM no longer knows the job"),
        3: Ended(3, None, "SLURM says FAILED"),
    }


def test_links_through_which_slurm_would_append_to_other_files_are_refused(cluster):
    Path("elsewhere").touch()
    Path("slurm").mkdir()
    Path("slurm/102_0_0_log.out").symlink_to("../elsewhere")
    with pytest.raises(ConfigError, match=r"102_0_0_log\.out") as refused:
        Slurm().connect(1, Path.cwd())
    assert refused.value.key == "resume"


def test_the_number_of_slurm_calls_does_not_grow_with_the_number_of_jobs(cluster, monkeypatch):
    monkeypatch.setattr(slurm, "_ASK_SECONDS", 60.0)
    cluster.hold()
    with Slurm().connect(9, Path.cwd()) as pool:
        for number in range(9):
            pool.submit(job(number))
        for _ in range(100):
            assert pool.wait(0) == []
        assert len(cluster.calls("squeue")) == 1
        assert len(cluster.calls("sbatch")) == 1


def test_missing_programs_and_packages_of_an_engine_are_named(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"there is no sbatch and no srun .*on PATH"):
        Slurm().connect(1, tmp_path)
    for engine in (slurm, ray, base):
        monkeypatch.setattr(engine, "is_installed", lambda name: False)
    with pytest.raises(ConfigError, match="pip install optuna"):
        Slurm(search="tpe")
    with pytest.raises(ConfigError, match="pip install submitit"):
        Slurm().connect(1, tmp_path)
    with pytest.raises(ConfigError, match="pip install ray"), Ray().connect(1, tmp_path):
        pass


def test_options_reach_sbatch(cluster):
    options: dict[str, Any] = {"partition": "gpu", "account": "me", "qos": "low", "constraint": "a100&nvlink"}
    own = Slurm(**options, gpus=2, mem_gb=1.5, timeout_min=30, setup=["echo begun > setup"], additional={"nice": 7})
    with own.connect(1, Path.cwd()) as pool:
        pool.submit(job(0))
        assert exit_codes_of(pool, 0) == {0: 0}
    sent = cluster.jobs["101"]["options"]
    wanted = options | {"gpus-per-node": "2", "mem": "1536M", "time": "30", "nice": "7", "signal": "USR2@120"}
    assert sent.items() >= wanted.items()
    assert "requeue" in sent
    assert sent["cpus-per-task"] == "8", "four for each of the processes that will use the GPUs"
    assert Path("setup").read_text() == "begun\n"
    assert reports_of_job(0)[0]["CUDA_VISIBLE_DEVICES"] == "0,1"


RUN = (*TINY_CPU, "batch_size=8", "steps=40", "save_every=10", "eval_every=0")


def start_sweep(cwd: Path, cluster: FakeSlurm, *words: str) -> Command:
    """Start a sweep whose jobs wait before step 30 until the file `go` exists in `cwd`, or they are asked to stop."""
    gate = {
        "STEP_GATE": f"30:{cwd / 'go'}",
        "PYTHONPATH": os.pathsep.join([cluster.variables["PYTHONPATH"], STEP_GATE_PYTHONPATH]),
    }
    return Command(cwd, *RUN, "-m", *words, "sweep=slurm", "sweep.threads=1", **cluster.variables | gate)


def checkpoints(cwd: Path, number: int) -> list[Path]:
    return sorted(cwd.glob(f"outputs/sweeps/*/*/{number:03d}-*/checkpoints/step_????????"))


def test_resume_of_a_preempted_job_that_a_later_command_adopts_is_bitwise_exact(tmp_path):
    """The scheduler is killed before the job is preempted."""
    cluster = FakeSlurm(tmp_path / "cluster")
    try:
        first = start_sweep(tmp_path / "sweep", cluster, "seed=1", "+sweep.additional.nice=7")
        wait_until(lambda: first.command_exit_code is not None or checkpoints(first.cwd, 0))
        first.signal_processes(signal.SIGKILL)
        first.wait()
        cluster.signal("101", signal.SIGUSR2)
        asked = len(cluster.calls("squeue"))
        later = start_sweep(tmp_path / "sweep", cluster, "seed=1", "+sweep.additional.nice=7", "resume=auto")
        wait_until(lambda: later.command_exit_code is not None or len(cluster.calls("squeue")) > asked)
        (later.cwd / "go").touch()  # the job was still running when the later command adopted it
        code, output = later.wait_for_all_processes()
    finally:
        cluster.close()
    assert code == 0, output
    [entry] = cluster.jobs.values()
    assert (entry["starts"], entry["options"]["nice"]) == (2, "7"), "preempted, requeued, and not submitted again"
    [ledger] = later.cwd.glob("outputs/sweeps/*/*/sweep.json")
    assert [entry["state"] for entry in json.loads(ledger.read_text())["jobs"].values()] == ["done"]
    [report] = later.cwd.glob("outputs/sweeps/*/*/000-*/environment.json")
    assert json.loads(report.read_text())["variables"]["OMP_NUM_THREADS"] == "1"
    assert run_command(*RUN, "seed=1", cwd=tmp_path / "alone")[0] == 0
    [undisturbed] = tmp_path.glob("alone/outputs/*/*/checkpoints/step_00000040/model.safetensors")
    preempted = checkpoints(later.cwd, 0)[-1] / "model.safetensors"
    assert preempted.read_bytes() == undisturbed.read_bytes(), "to the last bit"
