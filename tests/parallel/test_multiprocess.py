"""Tests of the base class of modes with several processes: number of processes, devices, external launchers."""

from typing import Any

import pytest
import torch
from helpers.compose import TINY_CPU, build_composed_run, compose_config, prepare_session
from helpers.fake_cuda import simulate_accelerators
from helpers.rank_functions import layers_left
from helpers.ranks import connected_session
from helpers.runs import assert_bitwise_equal

from runner.config.errors import ConfigError
from runner.device import Device
from runner.parallel.ddp import DDP
from runner.parallel.launch.cluster import RankInfo
from runner.parallel.launch.processes import ExternalProcesses, LocalProcesses
from runner.parallel.modules import Modules

CPU = torch.device("cpu")
GPUS = [torch.device("cuda", index) for index in range(3)]


def started_externally(monkeypatch: pytest.MonkeyPatch, rank: int) -> RankInfo:
    """Make this process pretend to be one of two processes that torchrun has started."""
    rank_info = RankInfo(rank, 2, rank, 2, "127.0.0.1", 1234)
    for name, value in rank_info.variables().items():
        monkeypatch.setenv(name, value)
    return rank_info


@pytest.mark.cases(
    (0, "auto", [], [CPU] * 2),
    (0, 1, [], [CPU]),
    (0, 5, [], [CPU] * 5),
    (3, "auto", [], GPUS),
    (3, 2, [], GPUS[:2]),
    (3, "auto", [2, 0], [GPUS[2], GPUS[0]]),
)
def test_the_devices_of_the_processes(visible, processes, indices, devices, monkeypatch):
    simulate_accelerators(monkeypatch, visible)
    launcher = DDP(processes=processes).launcher(Device(kind="cuda" if visible else "cpu", indices=indices))
    assert isinstance(launcher, LocalProcesses)
    assert launcher.devices == devices


@pytest.mark.cases(
    (0, [], CPU, None),
    (3, [], GPUS[1], None),
    (3, [2, 0], GPUS[0], None),
    (3, [2], CPU, ("device.indices", [2])),
    (1, [], GPUS[0], None),  # the only one that is bound to the process,
)
def test_an_externally_launched_process_uses_the_gpu_of_its_local_rank(visible, indices, device, refused, monkeypatch):
    simulate_accelerators(monkeypatch, visible)
    rank_info = started_externally(monkeypatch, 1)
    launcher = DDP(processes=2, timeout=7).launcher(Device(kind="cuda" if visible else "cpu", indices=indices))
    assert isinstance(launcher, ExternalProcesses)
    assert (launcher.rank_info, launcher.devices, launcher.mode.timeout) == (rank_info, [device], 7)
    assert (launcher.refusal and (launcher.refusal.key, launcher.refusal.got)) == refused


def test_options_that_an_external_launcher_sets(monkeypatch, caplog):
    for rank in (0, 1):
        started_externally(monkeypatch, rank)
        DDP(max_restarts=1).launcher(Device(kind="cpu"))
        assert [each.levelname for each in caplog.records if "max_restarts" in each.message] == ["WARNING"], "of rank 0"
    with pytest.raises(ConfigError) as refusal:
        DDP(processes=3).launcher(Device(kind="cpu"))
    assert (refusal.value.key, refusal.value.got) == ("parallel.processes", 3)


@pytest.mark.parametrize("mode", ["single", "dp", "model", "hogwild", "pipeline parallel.engine=streams"])
def test_modes_of_one_process_refuse_several(mode, monkeypatch):
    started_externally(monkeypatch, 1)
    with pytest.raises(ConfigError) as refusal:
        prepare_session(build_composed_run(*TINY_CPU, *f"parallel={mode}".split()))
    assert (refusal.value.key, refusal.value.got) == ("parallel.processes", 2)


def test_buffers_are_averaged_over_the_processes_and_each_gets_its_own_back(ranks):
    """Only floating-point buffers are averaged; of integers, all have those of rank 0."""
    config = compose_config(*TINY_CPU, "parallel=ddp", "batch_size=63")
    torch.manual_seed(0)
    equal = torch.rand(1000)
    for rank, ((means, variances, tracked), own) in enumerate(ranks(3).call_on_all(averaged, config, equal)):
        assert torch.equal(means, torch.ones(1000))
        assert torch.equal(variances, equal), "a sum of three in float32, divided by three, would differ"
        assert tracked == 0
        assert_bitwise_equal(own, [torch.full((1000,), float(rank)), equal, torch.tensor(rank)])


def averaged(config: dict[str, Any], equal: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """In a rank: return the buffers of a batch normalization while synchronized, and after; `equal` are variances."""
    with connected_session(config) as (_, session):
        norm: Any = torch.nn.BatchNorm1d(1000)
        norm.running_mean.fill_(session.rank)
        norm.running_var.copy_(equal)
        norm.num_batches_tracked.fill_(session.rank)
        with Modules(norm, session).synchronized():
            averages = [each.clone() for each in norm.buffers()]
        return averages, [*norm.buffers()]


TABLE = [  # overrides, the key and value of the refusal, words in its reason or remedy, and the number of GPUs
    # processes
    ("parallel=ddp parallel.processes=4", "parallel.processes", "4", ["2 GPUs may be used", "at most 2"], 2),
    # the batch
    ("parallel=ddp parallel.processes=4 batch_size=2", "batch_size", "2", ["batch_size=4"], 0),
    ("parallel=fsdp parallel.processes=3 batch_size=64", "batch_size", "64", ["batch_size=63 or batch_size=66"], 0),
    # devices
    ("parallel=hogwild device=cuda", "device.kind", "cuda", ["parallel=ddp"], 2),
    ("parallel=ddp device=mps", "device.kind", "mps", ["share one device", "parallel=single"], 0),
    ("parallel=fsdp device=cuda", "device.kind", "cuda", ["torch finds no CUDA device", "device=auto"], 0),
    ("parallel=ddp device=cuda device.index=2", "device.index", "2", ["2 CUDA devices are visible", "0 to 1"], 2),
    ("parallel=ddp device=cuda device.indices=[0,7]", "device.indices", "[0, 7]", ["0 to 1"], 2),
    # options
    ("parallel=ddp parallel.static_graph=true accumulation=2", "parallel.static_graph", "True", ["accumulation=1"], 0),
]


@pytest.mark.parametrize(("overrides", "key", "got", "words", "gpus"), TABLE)
def test_bad_input_is_refused_before_a_rank_starts(overrides, key, got, words, gpus, monkeypatch):
    simulate_accelerators(monkeypatch, gpus)
    with pytest.raises(ConfigError) as refusal:
        prepare_session(build_composed_run(*overrides.split()))
    assert (refusal.value.key, str(refusal.value.got)) == (key, got)
    for word in words:
        assert word in f"{refusal.value.why}\n{refusal.value.remedy}"
    assert len(str(refusal.value).splitlines()) <= 10


@pytest.mark.parametrize("mode", ["ddp", "fsdp", "pipeline"])
def test_a_network_is_freed_when_its_run_has_ended(mode, ranks, tmp_path):
    """As that of the proof at the start, which would take memory while the run trains."""
    config = compose_config(*TINY_CPU, "steps=2", "batch_size=16", "eval_every=2", f"parallel={mode}")
    assert ranks(2).call_on_all(layers_left, config, tmp_path) == [[], []]
