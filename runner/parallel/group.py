"""The group that the processes of a run talk in: where they meet, how they part, and how one leaves that has failed."""

from __future__ import annotations

import os
import socket
import stat
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

import torch

from runner.config import ConfigError
from runner.parallel.cluster import Place, interface_to, outer_place

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

HOST = "127.0.0.1"
"""Where the processes meet that this machine has started."""


def store_here(port: int | None) -> TCPStore:
    """The store where the processes of this machine meet; it lives in the one that starts them.

    Args:
        port: of this machine; None: any free one.

    Raises:
        ConfigError: when nothing can listen at `port`.
    """
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    try:
        return TCPStore(HOST, port or 0, is_master=True, wait_for_workers=False)
    except RuntimeError as error:
        why = f"nothing can listen there ({str(error).splitlines()[0][:100]})"
        raise ConfigError("parallel.port", port, why, "choose another, or null for any free one") from None


def meet(place: Place, device: torch.device, timeout: float) -> None:
    """Form the group with the others, as the process at `place`.

    Args:
        device: of this process; a GPU's tensors go over NCCL, those of the host over gloo.
        timeout: seconds that anybody waits for the others, now and later.
    """
    if interface := interface_to(place.host):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    patience = timedelta(seconds=timeout)
    if (started := outer_place()) is not None:
        store = _outer_store(started, patience)
    else:
        from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

        store = TCPStore(place.host, place.port, timeout=patience)
    before = _sockets()
    torch.distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=place.rank,
        world_size=place.world_size,
        timeout=patience,
    )
    _connections[:] = _sockets() - before


def part() -> None:
    """Leave the group, if there is one: the others are leaving too."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def hang_up() -> None:
    """Leave the group while the others are still in it: they must not wait for this process until their time is up.

    Gloo closes its connections with the last reference to the group; and a traceback, a mesh or a replica may hold one.
    """
    for number in _connections:
        with suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
            connection.getpeername()  # raises for the one that listens, whose end gloo does not survive
            connection.shutdown(socket.SHUT_RDWR)
    part()


_connections: list[int] = []
"""The sockets of the group that this process is in, by number."""


def _sockets() -> set[int]:
    """The sockets that this process has open, by number; none where the system does not list them."""
    found = set()
    with suppress(OSError):
        for name in os.listdir("/dev/fd"):  # Linux and macOS
            with suppress(OSError):  # what listed them is closed by now
                if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                    found.add(int(name))
    return found


def _outer_store(place: Place, patience: timedelta) -> Store:
    """The store of processes that torchrun or SLURM started, with room of its own for each group that they form."""
    from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]
    from torch.distributed.rendezvous import rendezvous

    if not _outer_stores:
        os.environ.update(place.variables())
        meeting = rendezvous("env://", place.rank, place.world_size, timeout=patience)
        _outer_stores.append(next(meeting)[0])  # kept: a second one would find the port taken by the first
    _outer_stores.append(PrefixStore(f"group {len(_outer_stores)}", _outer_stores[0]))
    _outer_stores[-1].set_timeout(patience)
    return _outer_stores[-1]


_outer_stores: list[Store] = []
"""The store, and its part for each group so far: where a job of a sweep failed, those after it make a new group."""
