"""Who started this process: the user, torchrun, or SLURM; read from the environment, without torch."""

from __future__ import annotations

import os
import re
import socket
import struct
import sys
from contextlib import suppress
from typing import NamedTuple


class Place(NamedTuple):
    """A process among those of a run, and where they meet.

    Args:
        rank, world_size: among all processes.
        local_rank, local_world_size: among those of this machine.
        host, port: of the store where they meet.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    host: str
    port: int

    def variables(self) -> dict[str, str]:
        """The environment variables by which torch finds its place."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": self.host,
            "MASTER_PORT": str(self.port),
        }


def outer_place() -> Place | None:
    """This process's place, where torchrun or SLURM's `srun` started it; None where the user did."""
    return _torchrun() or _slurm()


def outer_processes() -> int:
    """How many processes were started together by torchrun or `srun`; 1 without them."""
    place = outer_place()
    return place.world_size if place else 1


def _torchrun() -> Place | None:
    """https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables"""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if any(name not in os.environ for name in names):
        return None
    rank, world_size, local_rank, local_world_size, host, port = (os.environ[name] for name in names)
    return Place(int(rank), int(world_size), int(local_rank), int(local_world_size), host, int(port))


def _slurm() -> Place | None:
    """https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES

    `SLURM_STEP_*` are set for what `srun` starts. A batch script has `SLURM_NTASKS` too, but is alone.
    """
    read = os.environ.get
    world_size, rank = int(read("SLURM_STEP_NUM_TASKS", "1")), read("SLURM_PROCID")
    if world_size == 1 or rank is None:
        return None
    per_node = read("SLURM_STEP_TASKS_PER_NODE", str(world_size))
    counts = _expanded_counts(per_node)
    return Place(
        rank=int(rank),
        world_size=world_size,
        local_rank=int(read("SLURM_LOCALID", "0")),
        local_world_size=counts[int(read("SLURM_NODEID", "0"))],
        host=read("MASTER_ADDR") or first_host(read("SLURM_STEP_NODELIST", "localhost")),
        # Every task of a job finds the same one, and two jobs on one machine hardly ever.
        port=int(read("MASTER_PORT") or 20000 + int(read("SLURM_JOB_ID", "0")) % 20000),
    )


def _expanded_counts(text: str) -> list[int]:
    """`4(x2),3` → [4, 4, 3]: the tasks on each node."""
    counts = []
    for part in text.split(","):
        count, _, times = part.partition("(x")
        counts += [int(count)] * int(times.rstrip(")") or 1)
    return counts


def first_host(nodes: str) -> str:
    """The first of a SLURM node list: `gpu[07-09,12],login` → `gpu07`."""
    first = re.match(r"([^,\[]|\[[^\]]*\])+", nodes)
    assert first, nodes
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first.group())


_SIOCGIFADDR = 0x8915  # netdevice(7): the address of an interface


def interface_to(host: str) -> str | None:
    """The network interface that leads from this machine to `host`; None where that cannot be told (Linux, IPv4).

    Gloo would take the one that this machine's own name leads to, which often is 127.0.0.1.
    """
    if sys.platform != "linux":
        return None
    import fcntl

    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing
        address = socket.inet_aton(probe.getsockname()[0])
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no such address
                if fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))[20:24] == address:
                    return name
    return None
