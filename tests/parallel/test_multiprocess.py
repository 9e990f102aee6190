"""Tests of the base class of modes with several processes: number of processes, devices, external launchers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.compose import TINY_CPU, compose_config
from helpers.ranks import PersistentRanks, connected_session

from runner.config.errors import ConfigError
from runner.device import Device
from runner.parallel.ddp import DDP
from runner.parallel.launch.cluster import RankInfo
from runner.parallel.launch.processes import ExternalProcesses, LocalProcesses
from runner.parallel.multiprocess import average_buffers

CPU = torch.device("cpu")
GPUS = [torch.device("cuda", index) for index in range(3)]


@pytest.fixture
def _three_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)


@pytest.fixture
def second_of_two(monkeypatch: pytest.MonkeyPatch) -> RankInfo:
    """The `RankInfo` of this process, which pretends to be rank 1 of two processes that torchrun has started."""
    rank_info = RankInfo(1, 2, 1, 2, "127.0.0.1", 1234)
    for name, value in rank_info.variables().items():
        monkeypatch.setenv(name, value)
    return rank_info


@pytest.mark.parametrize(("processes", "count"), [("auto", 2), (1, 1), (5, 5)])
def test_the_number_of_processes_on_the_cpu(processes: Any, count: int) -> None:
    launcher = DDP(processes=processes).launcher(Device(kind="cpu"))
    assert isinstance(launcher, LocalProcesses)
    assert launcher.devices == [CPU] * count


@pytest.mark.usefixtures("_three_gpus")
@pytest.mark.parametrize(
    ("processes", "indices", "devices"),
    [("auto", [], GPUS), (2, [], GPUS[:2]), ("auto", [2, 0], [GPUS[2], GPUS[0]])],
)
def test_each_process_has_a_gpu_of_its_own(processes: Any, indices: list[int], devices: list[torch.device]) -> None:
    launcher = DDP(processes=processes).launcher(Device(kind="cuda", indices=indices))
    assert launcher.devices == devices


def test_externally_launched_processes_are_joined(second_of_two: RankInfo) -> None:
    launcher = DDP(timeout=7).launcher(Device(kind="cpu"))
    assert isinstance(launcher, ExternalProcesses)
    assert (launcher.rank_info, launcher.devices, launcher.timeout) == (second_of_two, [CPU], 7)


@pytest.mark.parametrize(("rank", "num_warnings"), [(0, 1), (1, 0)])
def test_rank_0_warns_that_max_restarts_has_no_effect_under_torchrun(
    rank: int, num_warnings: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in RankInfo(rank, 2, rank, 2, "127.0.0.1", 1234).variables().items():
        monkeypatch.setenv(name, value)
    DDP(max_restarts=1).launcher(Device(kind="cpu"))
    assert [record.levelname for record in caplog.records if "max_restarts" in record.message] == [
        "WARNING"
    ] * num_warnings


@pytest.mark.usefixtures("_three_gpus")
def test_an_externally_launched_process_uses_the_gpu_of_its_local_rank(second_of_two: RankInfo) -> None:
    assert DDP().launcher(Device(kind="cuda")).devices == [GPUS[1]]
    assert DDP().launcher(Device(kind="cuda", indices=[2, 0])).devices == [GPUS[0]]
    launcher = DDP().launcher(Device(kind="cuda", indices=[2]))
    assert isinstance(launcher, ExternalProcesses)
    assert launcher.refusal is not None
    assert (launcher.refusal.key, launcher.refusal.got) == ("device.indices", [2])


@pytest.mark.usefixtures("_three_gpus", "second_of_two")
def test_an_externally_launched_process_uses_the_only_gpu_that_is_bound_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    launcher = DDP().launcher(Device())
    assert isinstance(launcher, ExternalProcesses)
    assert (launcher.devices, launcher.refusal) == ([GPUS[0]], None)


@pytest.mark.parametrize(("processes", "fits"), [("auto", True), (2, True), (3, False)])
def test_the_number_of_processes_must_match_an_external_launcher(
    processes: Any, fits: bool, second_of_two: RankInfo
) -> None:
    if fits:
        assert isinstance(DDP(processes=processes).launcher(Device(kind="cpu")), ExternalProcesses)
        return
    with pytest.raises(ConfigError) as refusal:
        DDP(processes=processes).launcher(Device(kind="cpu"))
    assert (refusal.value.key, refusal.value.got) == ("parallel.processes", processes)


def test_buffers_are_averaged_over_the_processes(ranks: Callable[[int], PersistentRanks]) -> None:
    """Only floating-point buffers are averaged; each process keeps its own integer count."""
    config = compose_config(*TINY_CPU, "parallel=ddp", "batch_size=63")
    for rank, (mean, tracked) in enumerate(ranks(3).call_on_all(averaged, config)):
        assert mean == [1.0, 1.0]
        assert tracked == rank


def averaged(config: dict[str, Any]) -> tuple[list[float], int]:
    """In a rank: return the running mean and the batch count of a batch normalization after `average_buffers`."""
    with connected_session(config) as (_, session):
        norm = torch.nn.BatchNorm1d(2)
        assert norm.running_mean is not None
        assert norm.num_batches_tracked is not None
        norm.running_mean.fill_(session.rank)
        norm.num_batches_tracked.fill_(session.rank)
        average_buffers(norm, session.collectives)
        return norm.running_mean.tolist(), int(norm.num_batches_tracked)
