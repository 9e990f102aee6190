"""Tests of initializing, destroying and aborting the process group, and of its store."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.command import TIMEOUT_SECONDS
from helpers.ranks import PersistentRanks, Ranks
from helpers.runs import listening_addresses
from torch.distributed import HashStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from runner.config.errors import ConfigError
from runner.parallel.ddp import DDP
from runner.parallel.launch import process_group
from runner.parallel.launch.cluster import RankInfo, external_rank_info
from runner.parallel.launch.process_group import create_store
from runner.parallel.launch.processes import PRELOADED, ExternalProcesses
from runner.parallel.launch.supervisor import Report, Supervisor, start_heartbeat
from runner.system.forkserver import start_server
from runner.system.signals import StopRequest


def test_a_store_listens_only_on_the_loopback_interface(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)  # other tests, at the same time, may use the same port number for another IP version
    store = create_store()
    addresses = {address for address, port in listening_addresses(tmp_path) if port == store.port}
    assert addresses == {"0100007F"}
    TCPStore("127.0.0.1", store.port).set("key", "value")
    assert store.get("key") == b"value"


retained: list[Any] = []


def two_rank_info(rank: int, port: int) -> RankInfo:
    return RankInfo(rank, 2, rank, 2, process_group.HOST, port)


def init_and_destroy_group(pipe: Connection, rank: int, port: int) -> None:
    """Initialize and destroy a process group; report the sum over both ranks, and whether a group is left."""
    report = start_heartbeat(pipe)
    process_group.init_process_group(two_rank_info(rank, port), "cpu", 300, external=False)
    tensor = torch.tensor(float(rank + 1))
    torch.distributed.all_reduce(tensor)
    process_group.destroy_process_group()
    process_group.destroy_process_group()  # a second call does nothing
    report(Report(value=(float(tensor), torch.distributed.is_initialized())))


def abort_during_collective(pipe: Connection, rank: int, port: int) -> None:
    """Rank 0 aborts the process group while rank 1 waits in a collective whose timeout is an hour."""
    report = start_heartbeat(pipe)
    process_group.init_process_group(two_rank_info(rank, port), "cpu", 3600, external=False)
    torch.distributed.barrier()
    if rank == 0:
        retained.append(torch.distributed.group.WORLD)
        process_group.abort_process_group()
        report(Report(value="aborted"))
        return
    try:
        torch.distributed.all_reduce(torch.zeros(1))
    except RuntimeError as error:
        report(Report(value=type(error).__name__))


@pytest.mark.parametrize(
    ("work", "returned"),
    [
        (init_and_destroy_group, [(3.0, False)] * 2),
        # The collectives of rank 1 fail before the timeout, even if rank 0 still has references to the aborted group.
        (abort_during_collective, ["aborted", "RuntimeError"]),
    ],
    ids=["destroy", "abort"],
)
def test_a_process_group_is_left(work: Callable[..., None], returned: list[Any]) -> None:
    start_server(*PRELOADED)
    store = create_store()
    with Supervisor(work, [(rank, store.port) for rank in range(2)], TIMEOUT_SECONDS) as ranks:
        assert ranks.wait(StopRequest()) == returned


def test_abort_does_not_end_a_backend_in_agreement_with_the_other_ranks() -> None:
    ended = []

    class Recording(torch.distributed.ProcessGroup):
        def getBackendName(self) -> str:  # torch's name
            return "recording"

        def shutdown(self) -> None:
            ended.append("shutdown")

        def abort(self) -> None:
            ended.append("abort")

    torch.distributed.Backend.register_backend(
        "recording",
        lambda store, rank, size, timeout: Recording(rank, size),
        devices=["cpu"],  # pyright: ignore[reportCallIssue]
    )
    for leave in (process_group.destroy_process_group, process_group.abort_process_group):
        torch.distributed.init_process_group("recording", store=HashStore(), rank=0, world_size=1)
        leave()
        assert not torch.distributed.is_initialized()
    assert ended == ["shutdown", "abort"]


def test_externally_launched_ranks_initialize_several_groups_in_turn() -> None:
    ranks = PersistentRanks(2)  # separate from the fixture `ranks`, because this aborts their process group
    try:
        assert ranks.call_on_all(init_three_groups) == [[1.0, 1.0, 1.0]] * 2
    finally:
        ranks.close()


def init_three_groups() -> list[float]:
    """Create three process groups in turn between externally launched ranks; return what rank 0 broadcasts in each."""
    rank_info, received = external_rank_info(), []
    assert rank_info is not None
    for _ in range(3):
        process_group.init_process_group(rank_info, "cpu", 300, external=True)
        tensor = torch.tensor(1.0 - rank_info.rank)
        torch.distributed.broadcast(tensor, 0)
        received.append(float(tensor))
        torch.distributed.barrier()
        process_group.abort_process_group()
    return received


@pytest.mark.parametrize(
    ("kinds", "got"),
    [(["cuda", "cuda"], None), (["cuda", "cpu"], "cuda, cpu"), (["cuda", None], "gpu"), ([None, None], "gpu")],
    ids=str,
)
def test_devices_that_do_not_fit_together_are_refused_on_all_ranks(
    kinds: list[str | None], got: object, ranks: Ranks
) -> None:
    assert ranks(2).call_on_all(refusal_of_devices, kinds) == [got and ("device.kind", got)] * 2


def refusal_of_devices(kinds: list[str | None]) -> tuple[str, object] | None:
    """In a rank: return the refusal of devices of `kinds`, one for each rank; None: a rank without a device."""
    rank_info = external_rank_info()
    assert rank_info is not None
    kind, refusal = kinds[rank_info.rank], ConfigError("device.kind", "gpu", "there is none", "device=cpu")
    launcher = ExternalProcesses(rank_info, torch.device("cpu"), DDP(), None if kind else refusal)
    if kind:
        launcher._kind = lambda: kind  # type: ignore[method-assign]
    try:
        with launcher.connect():
            return None
    except ConfigError as error:
        return error.key, error.got
