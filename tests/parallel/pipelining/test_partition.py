"""Tests of partitions into stages: cuts at named blocks, stages of equal time, and block profiles."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.compose import build_composed_run

from models.convnet import ConvNet
from runner.config.errors import ConfigError
from runner.model.base import without_memory
from runner.parallel.pipelining import partition
from runner.parallel.pipelining.partition import Partition, balanced, blocks_of, positions_of, profile_blocks
from runner.precision import BFloat16, Precision

NAMES = ["stem", "layer1.0", "layer1.1", "layer2.0", "layer2.1", "head"]


@pytest.mark.parametrize(
    ("asked", "found"),
    [(["layer2.0"], [3]), (["layer2"], [3]), (["layer1", "layer2.1"], [1, 4]), (["layer1.1", "head"], [2, 5])],
)
def test_a_cut_is_the_name_of_a_block_or_layer(asked: list[str], found: list[int]) -> None:
    assert positions_of(asked, NAMES) == found


@pytest.mark.parametrize(
    ("asked", "remedy"),
    [
        (["layr2.1"], "did you mean layer2.1 or"),
        (["stem"], "parallel.cuts=[layer1.0]"),
        (["layer2", "layer1"], "parallel.cuts=[layer1.0,layer2.0]"),
        (["layer2", "layer2.0"], "parallel.cuts=[layer2.0]"),
    ],
)
def test_invalid_cuts_are_refused(asked: list[str], remedy: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        positions_of(asked, NAMES)
    assert refusal.value.key == "parallel.cuts"
    assert refusal.value.got in (asked[0], asked)
    assert remedy in refusal.value.remedy


def slowest(seconds: list[float], cut: tuple[int, ...] | list[int]) -> float:
    bounds = [0, *cut, len(seconds)]
    return max(sum(seconds[a:b]) for a, b in itertools.pairwise(bounds))


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_balanced_minimizes_the_time_of_the_slowest_stage(num_stages: int) -> None:
    draw = random.Random(0)
    for _ in range(20):
        seconds = [draw.random() ** 3 for _ in range(draw.randint(num_stages, 9))]
        found = balanced(seconds, num_stages)
        best = min(slowest(seconds, cut) for cut in itertools.combinations(range(1, len(seconds)), num_stages - 1))
        assert slowest(seconds, found) == pytest.approx(best)
        assert len(found) == num_stages - 1
        assert found == sorted(set(found))
    assert balanced([9, 1, 1, 1, 1], 3) == [1, 3], "even stages among equally fast partitions"


def test_the_checks_allocate_no_weights() -> None:
    run = build_composed_run("model=resnet50", "data.size=8", "parallel=pipeline", "parallel.cuts=[layer2]")
    run.workload.prepare()
    assert all(parameter.is_meta for parameter in without_memory(run.workload.build_model).parameters())
    with pytest.raises(ConfigError) as refusal:
        Partition(stages=19).check_partition(run.workload, 19)
    assert (refusal.value.key, refusal.value.got) == ("parallel.stages", 19)
    assert refusal.value.remedy == "at most parallel.stages=18"


def test_a_network_that_lists_no_blocks_is_refused() -> None:
    with pytest.raises(ConfigError) as refusal:
        blocks_of(torch.nn.Linear(1, 1))
    assert (refusal.value.key, refusal.value.got) == ("model", "Linear")


def context(precision: Precision, channels_last: bool = False) -> Any:
    """A context with only the attributes that `profile_blocks` uses."""
    return SimpleNamespace(precision=precision, channels_last=channels_last)


class Slow(torch.nn.Module):
    """A block that takes `seconds` according to a fake clock, so that a busy machine does not affect its time."""

    now = 0.0

    def __init__(self, seconds: float):
        super().__init__()
        self.seconds, self.weight = seconds, torch.nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Slow.now += self.seconds
        return x * self.weight


class SlowNetwork(torch.nn.ModuleDict):
    def blocks(self) -> list[tuple[str, torch.nn.Module]]:
        return list(self.items())


@pytest.mark.parametrize("frozen", [(), ("a", "c")])
def test_the_time_of_each_block_is_measured(frozen: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """The outputs of a frozen first block need no gradient, so there is no backward pass."""
    monkeypatch.setattr(partition.time, "perf_counter", lambda: Slow.now)
    network = SlowNetwork({"a": Slow(0.01), "b": Slow(0.03), "c": Slow(0.01)})
    for name in frozen:
        network.get_submodule(name).requires_grad_(False)
    profiles = profile_blocks(network, torch.zeros(2, 3), context(Precision()), timed=True)
    assert [profile.name for profile in profiles] == ["a", "b", "c"]
    assert [profile.seconds for profile in profiles] == pytest.approx([0.01, 0.03, 0.01])
    assert all(parameter.grad is None for parameter in network.parameters()), "copies were run"


@pytest.mark.parametrize("timed", [True, False])
def test_shapes_and_dtypes_are_found_and_the_network_is_unchanged(timed: bool) -> None:
    model = ConvNet(1, 8, 8, 10, channels=[4, 8], kernel_size=3, padding=1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    precision = BFloat16()
    precision.prepare(torch.device("cpu"))
    profiles = profile_blocks(model, torch.zeros(5, 1, 8, 8), context(precision, channels_last=True), timed)
    assert [profile.shape for profile in profiles] == [(4, 4, 4), (8, 2, 2), (50,), (10,)]
    assert {profile.dtype for profile in profiles} == {torch.bfloat16}
    assert all((profile.seconds > 0) is timed for profile in profiles)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert model.training
