"""The rank of this process under torchrun or SLURM, read from environment variables without importing torch."""

from __future__ import annotations

import os
import re
import socket
from contextlib import suppress
from typing import NamedTuple

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class RankInfo(NamedTuple):
    """The rank of a process, and the address of the store through which the processes find each other.

    `local_rank` and `local_world_size` are counted only on the machine of the process.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    host: str
    port: int

    def variables(self) -> dict[str, str]:
        """Return the rank and the address as the environment variables that torchrun sets."""
        return dict(zip(_TORCHRUN, map(str, self), strict=True))


def external_rank_info() -> RankInfo | None:
    """Return the rank of this process if torchrun, or `srun` with several tasks, started it; None otherwise."""
    if any(name not in os.environ for name in _TORCHRUN):
        return _slurm()
    rank, world_size, local_rank, local_world_size, host, port = (os.environ[name] for name in _TORCHRUN)
    return RankInfo(int(rank), int(world_size), int(local_rank), int(local_world_size), host, int(port))


def external_world_size() -> int:
    """Return the number of processes that torchrun or `srun` started together; 1 without them."""
    rank_info = external_rank_info()
    return rank_info.world_size if rank_info else 1


def _slurm() -> RankInfo | None:
    read = os.environ.get
    world_size, rank = int(read("SLURM_STEP_NUM_TASKS", "1")), read("SLURM_PROCID")
    if world_size == 1 or rank is None:
        return None
    counts = []  # the number of tasks on each node, of which `4(x2),3` is SLURM's notation for 4, 4 and 3
    for part in read("SLURM_STEP_TASKS_PER_NODE", str(world_size)).split(","):
        count, _, times = part.partition("(x")
        counts += [int(count)] * int(times.rstrip(")") or 1)
    return RankInfo(
        rank=int(rank),
        world_size=world_size,
        local_rank=int(read("SLURM_LOCALID", "0")),
        local_world_size=counts[int(read("SLURM_NODEID", "0"))],
        host=read("MASTER_ADDR") or first_host(read("SLURM_STEP_NODELIST", "localhost")),
        # A port that all tasks of a job compute, and that almost always differs from the ports of other jobs.
        port=int(read("MASTER_PORT") or 20000 + int(read("SLURM_JOB_ID", "0")) % 20000),
    )


def first_host(nodes: str) -> str:
    """Return the first host of a SLURM node list: `gpu[07-09,12],login` → `gpu07`."""
    first = re.match(r"([^,\[]|\[[^\]]*\])+", nodes)
    assert first, nodes
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first.group())


def interface_to(host: str) -> str | None:
    """Return the network interface through which this machine reaches `host` over IPv4; None if it is unknown.

    Gloo would use the interface to which the hostname resolves, which is often the loopback interface.
    """
    import psutil

    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # UDP: nothing is sent
        reached_from = probe.getsockname()[0]
        for name, addresses in psutil.net_if_addrs().items():
            if any(each.address == reached_from for each in addresses):
                return name
    return None
