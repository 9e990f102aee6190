"""Functions to initialize and destroy the default process group of `torch.distributed`, and to abort it on failure."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import psutil
import torch

from runner.parallel.launch.cluster import RankInfo, interface_to
from runner.system import torch_private

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]


def create_store() -> TCPStore:
    """Create the store through which the ranks on this machine find each other."""
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    listener = socket.create_server(("127.0.0.1", 0))
    # By itself, the store would listen on all interfaces, and anyone who connects can write to it.
    port, descriptor = listener.getsockname()[1], listener.detach()
    return TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)


def init_process_group(rank_info: RankInfo, kind: str, timeout: float, external: bool) -> None:
    """Initialize the default process group: tensors on a device of `kind` are sent over NCCL, say, others over gloo.

    A collective waits for other ranks for `timeout` seconds. On the CPU, the supervisor of ranks that we have started
    enforces it, and not gloo, which counts time during which all processes are suspended. Ranks are `external` if
    torchrun or SLURM has started them.

    Raises:
        RuntimeError: if the store cannot be reached, or the other ranks do not join in time.
    """
    global _progress
    _progress = int(kind == "cpu")
    limit = timedelta(seconds=timeout)
    if external:
        if interface := interface_to(rank_info.host):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        store = _external_store(rank_info, limit)
    else:
        for _, name in socket.if_nameindex():
            if name in ("lo", "lo0"):  # the loopback interface of Linux, and of macOS
                os.environ.update(GLOO_SOCKET_IFNAME=name, NCCL_SOCKET_IFNAME=name)
        from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

        store = TCPStore(rank_info.host, rank_info.port, timeout=limit)
    before = _connections()
    torch.distributed.init_process_group(
        # Without `device_id`, NCCL connects in the first collective: when all ranks have agreed on their devices.
        "gloo" if kind == "cpu" else f"cpu:gloo,{kind}:{torch.distributed.get_default_backend_for_device(kind)}",
        store=store,
        rank=rank_info.rank,
        world_size=rank_info.world_size,
        timeout=limit if external or kind != "cpu" else timedelta(days=30),
    )
    _gloo_connections[:] = _connections() - before


def destroy_process_group() -> None:
    """Destroy the process group, if there is one; if other ranks still use it, call `abort_process_group` instead."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        _gloo_connections.clear()  # their descriptors may be used again, for other connections


def abort_process_group() -> None:
    """Leave the process group while other ranks still use it, so that their collectives fail before the timeout.

    Gloo closes its connections when the last reference to the group is gone, which a traceback may hold. Therefore, we
    shut them down through their file descriptors, until there is a public `ProcessGroupGloo.shutdown`
    (https://github.com/pytorch/pytorch/issues/130345).
    """
    fail_collectives()
    if torch.distributed.is_initialized():
        torch_private.abort_process_group()
        _gloo_connections.clear()


@contextmanager
def no_process_group() -> Iterator[None]:
    """A context in which there is no process group, also for code of the user that would gather tensors of others."""
    group: Any = getattr(torch.distributed, "group", None)  # torch may be built without it
    before = group and group.WORLD
    try:
        if before is not None:
            group.WORLD = None
        yield
    finally:
        if before is not None:
            group.WORLD = before


def fail_collectives() -> None:
    """Shut down gloo's connections, so that waiting collectives fail, on this rank and on other ranks."""
    for descriptor in _gloo_connections:
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            connection.shutdown(socket.SHUT_RDWR)


def progress() -> int:
    """Return a number that grows with each communication operation that this rank starts; the heartbeat sends it.

    On GPUs, it is always 0: torch does not count all NCCL operations, and NCCL's own watchdog ends those that time out.
    """
    with suppress(RuntimeError):  # the group is just being destroyed
        return _progress + torch_private.num_operations() if _progress else 0
    return 0


_progress = 0
"""1 once this rank joins the other ranks on a CPU; 0 before, and always 0 on GPUs."""

_gloo_connections: list[int] = []
"""The file descriptors of the connections that `init_process_group` has opened."""


def _connections() -> set[int]:
    """Return the file descriptors of the TCP connections of this process, without listening sockets.

    Gloo would crash if the socket in which it listens were shut down.
    """
    found = psutil.Process().net_connections("tcp")
    return {each.fd for each in found if each.status == psutil.CONN_ESTABLISHED}


def _external_store(rank_info: RankInfo, timeout: timedelta) -> Store:
    """Return the store of the processes of torchrun or SLURM. Each call adds a different prefix to all keys."""
    from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]
    from torch.distributed.rendezvous import rendezvous

    if not _external_stores:
        os.environ.update(rank_info.variables())
        found = rendezvous("env://", rank_info.rank, rank_info.world_size, timeout=timeout)
        _external_stores.append(next(found)[0])  # kept: the port is in use, so there cannot be a second store
    _external_stores.append(PrefixStore(f"group {len(_external_stores)}", _external_stores[0]))
    _external_stores[-1].set_timeout(timeout)
    return _external_stores[-1]


_external_stores: list[Store] = []
"""First the store itself, then a `PrefixStore` for each process group: a run after a failed one needs another."""
