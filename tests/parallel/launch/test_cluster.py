"""Tests of the rank that torchrun or SLURM sets in environment variables, and of the network interface to a host."""

from __future__ import annotations

import os
import socket
import sys

import pytest

from runner.parallel.launch.cluster import RankInfo, external_rank_info, external_world_size, first_host, interface_to

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "gpu07",
    "MASTER_PORT": "29500",
}
SLURM = {  # the second task on the second of two nodes, which have four and three tasks
    "SLURM_JOB_ID": "123456",
    "SLURM_NTASKS": "7",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
    "SLURM_STEP_NODELIST": "gpu[07,12]",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}


@pytest.fixture(autouse=True)
def _without_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name in TORCHRUN or name.startswith("SLURM_"):
            monkeypatch.delenv(name)


def started(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> RankInfo | None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return external_rank_info()


def test_no_launcher() -> None:
    assert external_rank_info() is None
    assert external_world_size() == 1


def test_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    assert started(monkeypatch, TORCHRUN) == RankInfo(5, 8, 1, 4, "gpu07", 29500)
    assert external_world_size() == 8


@pytest.mark.parametrize("missing", TORCHRUN)
def test_incomplete_torchrun_variables_are_ignored(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's shell may export a variable such as RANK without torchrun."""
    assert started(monkeypatch, {name: value for name, value in TORCHRUN.items() if name != missing}) is None


def test_variables_are_those_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    rank_info = RankInfo(5, 8, 1, 4, "gpu07", 29500)
    assert rank_info.variables() == TORCHRUN
    assert started(monkeypatch, rank_info.variables()) == rank_info


def test_srun(monkeypatch: pytest.MonkeyPatch) -> None:
    assert started(monkeypatch, SLURM) == RankInfo(5, 7, 1, 3, "gpu07", 20000 + 123456 % 20000)


def test_all_srun_tasks_get_the_same_store_address(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for rank in range(7):
        node, local = (0, rank) if rank < 4 else (1, rank - 4)
        own = {"SLURM_PROCID": str(rank), "SLURM_NODEID": str(node), "SLURM_LOCALID": str(local)}
        found.append(started(monkeypatch, SLURM | own))
    assert [each.rank for each in found if each] == list(range(7))
    assert [each.local_world_size for each in found if each] == [4] * 4 + [3] * 3
    assert len({(each.host, each.port) for each in found if each}) == 1


def test_a_given_master_address_takes_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    rank_info = started(monkeypatch, SLURM | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4321"})
    assert rank_info is not None
    assert (rank_info.host, rank_info.port) == ("10.0.0.1", 4321)


def test_a_batch_script_is_a_single_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """`sbatch --ntasks=7` sets SLURM_NTASKS=7 in the batch script, but runs the script once: srun starts the tasks."""
    assert started(monkeypatch, {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "7", "SLURM_PROCID": "0"}) is None


def test_an_interactive_shell_in_a_job_is_a_single_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """`srun --pty bash` starts a single task."""
    assert started(monkeypatch, SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}) is None


def test_torchrun_within_srun_takes_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    assert started(monkeypatch, SLURM | TORCHRUN) == RankInfo(5, 8, 1, 4, "gpu07", 29500)


@pytest.mark.parametrize(
    ("per_node", "node", "wanted"),
    [("4(x2),3", 0, 4), ("4(x2),3", 1, 4), ("4(x2),3", 2, 3), ("2", 0, 2), ("1(x16)", 15, 1), ("3,1(x2),2", 3, 2)],
)
def test_the_number_of_tasks_on_a_node(per_node: str, node: int, wanted: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rank_info = started(monkeypatch, SLURM | {"SLURM_STEP_TASKS_PER_NODE": per_node, "SLURM_NODEID": str(node)})
    assert rank_info is not None
    assert rank_info.local_world_size == wanted


@pytest.mark.parametrize(
    ("nodes", "wanted"),
    [
        ("gpu07", "gpu07"),
        ("gpu07,login", "gpu07"),
        ("gpu[07-09,12],login", "gpu07"),
        ("gpu[12,14-15]", "gpu12"),
        ("rack[1-2]-gpu[3-4]", "rack1-gpu3"),
        ("a-b.cluster.org,c", "a-b.cluster.org"),
        ("gpu[001-128].cluster", "gpu001.cluster"),
    ],
)
def test_the_first_host_of_a_node_list(nodes: str, wanted: str) -> None:
    assert first_host(nodes) == wanted


linux = pytest.mark.skipif(sys.platform != "linux", reason="asks Linux's kernel")


@linux
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_this_machine_is_reached_over_the_loopback_interface(host: str) -> None:
    assert interface_to(host) == "lo"


def test_no_interface_leads_to_an_unknown_host() -> None:
    assert interface_to("nowhere.invalid") is None


@linux
def test_the_interface_to_this_machines_own_address() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # RFC 5737: reserved for documentation, no host has it
        except OSError:
            pytest.skip("no network")
        own = probe.getsockname()[0]
    assert interface_to(own) == interface_to("192.0.2.1") in [name for _, name in socket.if_nameindex()]
