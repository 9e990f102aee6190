"""Tests of runs with several processes, started by the command, by torchrun, by SLURM, or on two machines."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.run as torchrun
from helpers import rank_functions, runs
from helpers.command import TIMEOUT_SECONDS, Command, child_environment, processes_in, run_successfully, wait_until
from helpers.compose import TINY_CPU, build_composed_run, compose_config, train_in
from helpers.dry_run import run_in_this_process
from helpers.ranks import PersistentRanks
from torch.distributed.launcher.api import elastic_launch

from runner.parallel.launch.cluster import RankInfo
from runner.parallel.launch.process_group import create_store
from runner.parallel.launch.processes import PRELOADED
from runner.parallel.launch.supervisor import Supervisor
from runner.system import cpu
from runner.system.forkserver import start_server
from runner.system.signals import StopRequest

SHORT = ("steps=40", "save_every=20", "log_every=20", "eval_every=20")


@pytest.fixture(scope="module")
def launched(tmp_path_factory) -> Path:
    """The run directory of a command that started its two processes itself."""
    cwd = tmp_path_factory.mktemp("launched")
    assert "done after step 40/40" in run_successfully(cwd, *runs.TWO_RANK_DDP, *SHORT)
    return runs.only_run(cwd)


def test_one_run_directory_with_a_log_for_each_rank(launched):
    names = {path.name for path in launched.iterdir()}
    assert names >= {"log.txt", "log_rank_1.txt", "result.json", "config.yaml", "checkpoints"}
    assert [name for name in names if name.startswith("events")] != []
    assert len(list(launched.parent.iterdir())) == 1
    result = json.loads((launched / "result.json").read_text())
    assert (result["status"], result["steps"], result["world_size"]) == ("done", 40, 2)
    assert result["metrics"].keys() >= {"train/loss", "eval/accuracy"}
    newest = launched / "checkpoints/step_00000040"
    assert {path.name for path in newest.iterdir()} >= {"rank_0.pt", "rank_1.pt"}
    for name in ("log.txt", "log_rank_1.txt"):
        lines = [line for line in (launched / name).read_text().splitlines() if "step 40: train/loss" in line]
        assert len(lines) == 1, name


def test_each_rank_gets_its_rank_info_and_may_get_a_signal_after_training(tmp_path):
    """Ctrl-C also reaches the ranks, so a rank may end its training before it gets the supervisor's signal."""
    run = build_composed_run(*runs.TWO_RANK_DDP, *SHORT, "parallel.processes=3", "batch_size=63")
    found: Any = train_in(tmp_path, run, train_rank=rank_functions.rank_infos).result
    assert [each["group"] for each in found] == [(rank, 3) for rank in range(3)]
    assert {each["LOCAL_WORLD_SIZE"] for each in found} == {"3"}
    if sys.platform == "linux":
        assert {each["GLOO_SOCKET_IFNAME"] for each in found} == {"lo"}


def test_ranks_share_the_cores_of_a_cpu_quota(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(cpu, "_allowed_cores", lambda: list(range(16)))
    monkeypatch.setattr(cpu, "_quota_cores", lambda: 6.5)
    assert cpu.cores_per_process() == 3


@pytest.mark.cases(
    (None, ["device.threads=null"], max(1, len(cpu._allowed_cores()) // 2)),
    (None, ["device.threads=3"], 3),
    ("5", ["device.threads=null"], 5),
    ("5", ["device.threads=3"], 3),
    ids=["an equal share of the cores", "device.threads", "OMP_NUM_THREADS", "device.threads wins"],
)
def test_the_number_of_threads_of_each_rank(asked, overrides, wanted):
    config, store = compose_config(*runs.TWO_RANK_DDP, *SHORT, *overrides), create_store()
    infos = [RankInfo(rank, 2, rank, 2, "127.0.0.1", store.port) for rank in (0, 1)]
    arguments = [(asked, config, info) for info in infos]
    with Supervisor(rank_functions.report_num_threads, arguments, TIMEOUT_SECONDS) as ranks:
        assert ranks.wait(StopRequest()) == [wanted] * 2


def torchrun_variables(rank: int, port: int) -> dict[str, str]:
    return RankInfo(rank, 2, rank, 2, "127.0.0.1", port).variables()


def slurm_variables(rank: int, port: int) -> dict[str, str]:
    """Return the variables of one of two SLURM tasks on this machine; the port is derived from the job ID."""
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "localhost"}
    job = {"SLURM_JOB_ID": str(port - 20000), "SLURM_NTASKS": "2"}
    return job | step | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_NODEID": "0"}


def started(tmp_path: Path, *arguments: str, variables: Any = torchrun_variables) -> Any:
    """Start the two processes of one run as separate commands."""
    port = runs.free_port()
    while not 20000 < port < 40000:  # the range of the ports derived from SLURM job IDs
        port = runs.free_port()
    common = (*TINY_CPU, "parallel=ddp", *SHORT, f"output_root={tmp_path}/outputs", *arguments)
    return [Command(tmp_path / f"host_{i}", *common, **variables(i, port)) for i in (0, 1)]


def test_two_tasks_of_slurm_train_one_run(tmp_path, launched):
    first, second = started(tmp_path, variables=slurm_variables)
    code, console = first.wait_for_all_processes()
    assert code == 0, console
    assert "done after step 40/40" in console
    assert second.wait_for_all_processes() == (0, ""), "rank 1 prints nothing"
    runs.assert_checkpoint_bitwise_equal(runs.only_run(tmp_path), runs.checkpoint_tensors(launched))
    assert (runs.only_run(tmp_path) / "log_rank_1.txt").exists()


REFUSALS = [  # the arguments of both ranks, further ones of rank 1, and what both print
    ([], ["optimizer.lr=0.3"], r"optimizer\.lr: .*rank 0 was started with 0\.05, rank 1 with 0\.3"),
    (["parallel=single"], [], r"parallel\.processes: got "),
    (["resume=../empty"], [], "resume: got "),
    (["data=imagefolder", "data.root=photos", "batch_size=4"], [], ".*data.root: got 'photos': "),
    (["-m", "seed=0,1"], [], "-m: torchrun or SLURM has started several processes"),
]


@pytest.mark.parametrize(
    ("arguments", "others", "printed"), REFUSALS, ids=["config", "mode", "rank 0", "data", "sweep"]
)
def test_what_one_rank_refuses_ends_all_ranks_with_its_words(arguments, others, printed, ranks, tmp_path):
    (tmp_path / "empty").mkdir()
    runs.write_images(tmp_path / "host_0" / "photos")  # but not on the other host
    for code, console in ranks(2).call_on_all(command_in_rank, arguments, others, tmp_path):
        assert code == 2, console
        assert re.match(printed, console, re.DOTALL), console
        assert len(console.splitlines()) <= 10
    assert not (tmp_path / "outputs").exists()


def command_in_rank(arguments: list[str], others: list[str], directory: Path) -> tuple[int, str]:
    """In a rank: run the command; return its exit code and what it printed."""
    rank = int(os.environ["RANK"])
    (directory / f"host_{rank}").mkdir(exist_ok=True)
    common = (*TINY_CPU, "parallel=ddp", *SHORT, f"output_root={directory}/outputs", *arguments)
    return run_in_this_process([*common, *others * rank], directory / f"host_{rank}")


def test_processes_that_do_not_come_are_missed_in_words(tmp_path, monkeypatch):
    for name, value in (torchrun_variables(0, runs.free_port()) | {"OMP_NUM_THREADS": "1"}).items():
        monkeypatch.setenv(name, value)
    code, console = run_in_this_process([*TINY_CPU, "parallel=ddp", "parallel.timeout=1"], tmp_path)
    assert code == 2, console
    assert console.startswith("parallel.timeout: got 1.0: of 2 processes, not all have come: ")


def test_a_sweep_goes_on_after_a_job_that_failed_on_one_rank(tmp_path, launched):
    """Both ranks initialize a new process group, so that the next job gets no messages of the failed one."""
    config = compose_config(*runs.TWO_RANK_DDP, *SHORT)
    ranks = PersistentRanks(2)  # separate from the fixture `ranks`, because this aborts their process group
    try:
        first, second = ranks.call_on_all(rank_functions.run_sweep_jobs, [config] * 3, tmp_path)
    finally:
        ranks.close()
    assert first[1] != second[1] == "only here"
    assert "gloo" in first[1]
    assert [first[i] for i in (0, 2)] == [second[i] for i in (0, 2)] == ["done"] * 2
    logged = r"rank 1 failed: ValueError: only here \(.*rank_functions\.py:\d+\)\nTraceback \(most recent call last\)"
    assert len(re.findall(logged, (tmp_path / "1/log_rank_1.txt").read_text())) == 1
    for job in (0, 2):
        runs.assert_checkpoint_bitwise_equal(tmp_path / str(job), runs.checkpoint_tensors(launched))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, 1), (signal.SIGTERM, 75)])
def test_a_killed_process_or_a_signal_to_one_ends_all(number, code, rank, tmp_path):
    commands = started(tmp_path, "steps=100000")
    wait_until(lambda: list(tmp_path.glob("outputs/*/*/checkpoints/step_*")))
    commands[rank].signal_processes(number)
    codes = [command.wait_for_all_processes()[0] for command in commands]
    assert codes[1 - rank] == code
    if number == signal.SIGTERM:
        assert codes[rank] == code
        step = runs.checkpoint_tensors(runs.only_run(tmp_path))["step"]
        assert f"stopped after step {step}/100000" in commands[0].console


def test_a_stopped_process_ends_the_others(tmp_path):
    first, second = started(tmp_path, "steps=100000", "parallel.timeout=4")
    wait_until(lambda: list(tmp_path.glob("outputs/*/*/checkpoints/step_*")))
    second.signal_processes(signal.SIGSTOP)
    code, console = first.wait_for_all_processes()
    second.signal_processes(signal.SIGKILL)
    assert code == 1
    assert "crashed after step" in console


def in_background(cwd: Path, *words: str, **variables: str) -> subprocess.Popen[str]:
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(words, cwd=cwd, env=child_environment(**variables), **pipes)


@pytest.fixture
def _signal_handlers_restored() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    yield
    for number, handler in before.items():
        if signal.getsignal(number) != handler:
            signal.signal(number, handler)


@pytest.mark.usefixtures("_signal_handlers_restored")
def test_two_processes_of_torchrun(tmp_path, launched):
    """The agent of torchrun is this process; it starts the two that it would start as new interpreters by forks."""
    start_server(*PRELOADED)
    words = ["--nproc-per-node=2", "--start-method=forkserver", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    config, _, _ = torchrun.config_from_args(torchrun.parse_args([*words, "-m", "runner"]))
    found = elastic_launch(config, run_in_this_process)([*TINY_CPU, "parallel=ddp", *SHORT], tmp_path)
    assert [found[rank][0] for rank in (0, 1)] == [0, 0], found
    assert found[0][1].count("done after step 40/40") == 1
    assert found[1][1] == "", "rank 1 is silent"
    runs.assert_checkpoint_bitwise_equal(runs.only_run(tmp_path), runs.checkpoint_tensors(launched))


@pytest.mark.slow
def test_two_commands_of_torchrun_as_on_two_machines(tmp_path, launched):
    words = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    words += ["--master-addr=127.0.0.1", f"--master-port={runs.free_port()}"]
    command = ["-m", "runner", *TINY_CPU, "parallel=ddp", *SHORT]
    begun = [in_background(tmp_path, *words, f"--node-rank={rank}", *command, PYTHONWARNINGS="") for rank in (0, 1)]
    consoles = [process.communicate(timeout=TIMEOUT_SECONDS)[0] for process in begun]
    assert [process.returncode for process in begun] == [0, 0], consoles
    assert consoles[0].count("done after step 40/40") == 1
    assert "step" not in consoles[1], "rank 1 is silent"
    runs.assert_checkpoint_bitwise_equal(runs.only_run(tmp_path), runs.checkpoint_tensors(launched))


HOSTS = ("10.99.0.1", "10.99.0.2")


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def link() -> Iterator[list[str]]:
    """The names of two network namespaces connected by a veth pair; each interface is named like its namespace."""
    names = [f"runner{os.getpid()}{side}" for side in "ab"]
    try:
        for name in names:
            ip("netns", "add", name)
        first, second = names
        ip("link", "add", first, "netns", first, "type", "veth", "peer", "name", second, "netns", second)
        for name, address in zip(names, HOSTS, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", name)
            for device in ("lo", name):
                ip("-n", name, "link", "set", device, "up")
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this machine does not let the test make network namespaces")
    yield names
    for name in names:
        ip("netns", "del", name)


def on_both(link: list[str], cwd: Path, *overrides: str) -> list[subprocess.Popen[str]]:
    """Start the same command in both namespaces, with one process each."""
    port, begun = runs.free_port(), []
    for rank, name in enumerate(link):
        own = torchrun_variables(rank, port) | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": HOSTS[0]}
        words = ["ip", "netns", "exec", name, sys.executable, "-m", "runner", *TINY_CPU, "parallel=ddp", *overrides]
        begun.append(in_background(cwd, *words, **own))
    return begun


@pytest.mark.netns
def test_two_machines(link, tmp_path, launched):
    both = on_both(link, tmp_path, *SHORT)
    consoles = [process.communicate(timeout=TIMEOUT_SECONDS)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], consoles
    runs.assert_checkpoint_bitwise_equal(runs.only_run(tmp_path), runs.checkpoint_tensors(launched))


@pytest.mark.netns
def test_a_broken_network_link_ends_the_processes_on_both_machines(link, tmp_path):
    both = on_both(link, tmp_path, *SHORT, "steps=100000", "parallel.timeout=15")
    wait_until(lambda: list(tmp_path.glob("outputs/*/*/checkpoints/step_*")))
    ip("-n", link[0], "link", "set", link[0], "down")
    consoles = [process.communicate(timeout=TIMEOUT_SECONDS)[0] for process in both]
    assert [process.returncode for process in both] == [1, 1], consoles
    wait_until(lambda: not processes_in(tmp_path), what="left behind")
