"""Tests of the rank that torchrun or SLURM sets in environment variables, and of the network interface to a host."""

import os
import socket

import pytest

from runner.parallel.launch.cluster import RankInfo, external_rank_info, external_world_size, first_host, interface_to

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
def _without_launcher(monkeypatch) -> None:
    for name in os.environ:
        if name in TORCHRUN or name.startswith("SLURM_"):
            monkeypatch.delenv(name)


TORCHRUN_INFO, SLURM_INFO = RankInfo(5, 8, 1, 4, "gpu07", 29500), RankInfo(5, 7, 1, 3, "gpu07", 20000 + 123456 % 20000)
TORCHRUN = TORCHRUN_INFO.variables()  # as torchrun names them: see test_processes.py


def tasks(per_node: str, node: int) -> dict[str, str]:
    return SLURM | {"SLURM_STEP_TASKS_PER_NODE": per_node, "SLURM_NODEID": str(node)}


@pytest.mark.cases(
    ({}, None),
    (TORCHRUN, TORCHRUN_INFO),
    # A user's shell may export a variable such as RANK without torchrun.
    *(({name: TORCHRUN[name] for name in TORCHRUN if name != missing}, None) for missing in TORCHRUN),
    (SLURM, SLURM_INFO),
    (tasks("4(x2),3", 1), SLURM_INFO._replace(local_world_size=4)),
    (tasks("4(x2),3", 2), SLURM_INFO),
    (tasks("2", 0), SLURM_INFO._replace(local_world_size=2)),
    (tasks("1(x16)", 15), SLURM_INFO._replace(local_world_size=1)),
    (SLURM | TORCHRUN, TORCHRUN_INFO),  # torchrun within srun takes precedence
    (SLURM | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4321"}, SLURM_INFO._replace(host="10.0.0.1", port=4321)),
    # `sbatch --ntasks=7` sets SLURM_NTASKS=7 in the batch script, but runs it once: srun starts the tasks.
    ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "7", "SLURM_PROCID": "0"}, None),
    (SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, None),  # `srun --pty bash` starts a single task,
    ids=range(17),
)
def test_the_rank_is_read_from_the_variables_of_the_launcher(variables, found, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert external_rank_info() == found
    assert external_world_size() == (found.world_size if found else 1)


@pytest.mark.cases(
    ("gpu07", "gpu07"),
    ("gpu[07-09,12],login", "gpu07"),
    ("rack[1-2]-gpu[3-4]", "rack1-gpu3"),
    ("a-b.cluster.org,c", "a-b.cluster.org"),
    ("gpu[001-128].cluster", "gpu001.cluster"),
)
def test_the_first_host_of_a_node_list(nodes, wanted):
    assert first_host(nodes) == wanted


def test_the_interface_to_a_host():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # RFC 5737: reserved for documentation, no host has it
        except OSError:
            pytest.skip("no network")
        own = probe.getsockname()[0]
    assert interface_to("127.0.0.1") == "lo"
    assert interface_to("nowhere.invalid") is None
    assert interface_to(own) == interface_to("192.0.2.1") in [name for _, name in socket.if_nameindex()]
