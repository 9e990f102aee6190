"""Tests of partitions into stages: cuts, block profiles, what is sent, and the engine that has all stages."""

import itertools
import random
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.compose import build_composed_run
from torch import nn

from runner.config.errors import ConfigError
from runner.model.base import without_memory
from runner.models.convnet import ConvNet
from runner.models.resnet import ResNet
from runner.parallel.model import ModelParallel
from runner.parallel.pipeline import Pipeline
from runner.parallel.pipelining import partition as partitioning
from runner.parallel.pipelining.engines import StreamEngine, clock
from runner.parallel.pipelining.stages import StageModule, keep_only
from runner.parallel.pipelining.timeline import Timeline
from runner.precision import BFloat16, Precision

NAMES = ["stem", "layer1.0", "layer1.1", "layer2.0", "layer2.1", "head"]


@pytest.mark.parametrize(
    ("asked", "found"),
    [(["layer2.0"], [3]), (["layer2"], [3]), (["layer1", "layer2.1"], [1, 4]), (["layer1.1", "head"], [2, 5])],
)
def test_a_cut_is_the_name_of_a_block_or_layer(asked, found):
    assert partitioning.positions_of(asked, NAMES) == found


def test_blocks_of_a_sequential_are_cut_by_number():
    assert partitioning.positions_of(partitioning.Partition(cuts=[1, "3"]).cuts, ["0", "1", "2", "3"]) == [1, 3]
    for cuts in ([1.0], [True], 1):
        with pytest.raises(ConfigError, match="neither auto nor a list of blocks"):
            partitioning.Partition(cuts=cuts)


@pytest.mark.cases(
    (["layr2.1"], "did you mean layer2.1 or"),
    (["stem"], "parallel.cuts=[layer1.0]"),
    (["layer2", "layer1"], "parallel.cuts=[layer1.0,layer2.0]"),
    (["layer2", "layer2.0"], "parallel.cuts=[layer2.0]"),
)
def test_invalid_cuts_are_refused(asked, remedy):
    with pytest.raises(ConfigError) as refusal:
        partitioning.positions_of(asked, NAMES)
    assert refusal.value.key == "parallel.cuts"
    assert refusal.value.got in (asked[0], asked)
    assert remedy in refusal.value.remedy


def slowest(seconds: list[float], cut: tuple[int, ...] | list[int]) -> float:
    bounds = [0, *cut, len(seconds)]
    return max(sum(seconds[a:b]) for a, b in itertools.pairwise(bounds))


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_balanced_minimizes_the_time_of_the_slowest_stage(num_stages):
    draw = random.Random(0)
    for _ in range(20):
        seconds = [draw.random() ** 3 for _ in range(draw.randint(num_stages, 9))]
        found = partitioning.balanced(seconds, num_stages)
        best = min(slowest(seconds, cut) for cut in itertools.combinations(range(1, len(seconds)), num_stages - 1))
        assert slowest(seconds, found) == pytest.approx(best)
        assert len(found) == num_stages - 1
        assert found == sorted(set(found))
    assert partitioning.balanced([9, 1, 1, 1, 1], 3) == [1, 3], "even stages among equally fast partitions"


def test_no_stage_begins_between_blocks_that_share_a_tensor_if_that_is_possible():
    layers = [torch.nn.Linear(2, 2) for _ in range(5)]
    layers[3].weight = layers[1].weight
    assert partitioning.tied_positions(torch.nn.Sequential(*layers), may_share=True) == set(), "it is a parameter"
    tied = partitioning.tied_positions(torch.nn.Sequential(*layers), may_share=False)
    assert tied == {2, 3}
    assert partitioning.balanced([1, 1, 1, 1, 1], 2, tied) in ([1], [4])
    assert partitioning.balanced([1, 1, 1, 1, 1], 3, tied) == [1, 4]
    assert partitioning.balanced([1, 1, 1, 1, 1], 4, tied) == []


def test_networks_with_too_few_blocks_are_refused_without_memory_for_weights():
    run = build_composed_run("model=resnet50", "data.size=8", "parallel=pipeline", "parallel.cuts=[layer2]")
    run.workload.prepare()
    assert all(parameter.is_meta for parameter in without_memory(run.workload.build_model).parameters())
    with pytest.raises(ConfigError) as refusal:
        partitioning.Partition(stages=19).check_partition(run.workload, 19)
    assert (refusal.value.key, refusal.value.got) == ("parallel.stages", 19)
    assert refusal.value.remedy == "at most parallel.stages=18"
    with pytest.raises(ConfigError, match=r"^model: got 'Linear': .* no blocks"):
        partitioning.blocks_of(torch.nn.Linear(1, 1))


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
def test_the_time_of_each_block_is_measured(frozen, monkeypatch):
    """The outputs of a frozen first block need no gradient, so there is no backward pass."""
    monkeypatch.setattr(partitioning.time, "perf_counter", lambda: Slow.now)
    network = SlowNetwork({"a": Slow(0.01), "b": Slow(0.03), "c": Slow(0.01)})
    for name in frozen:
        network.get_submodule(name).requires_grad_(False)
    profiles = partitioning.profile_blocks(network, torch.zeros(2, 3), context(Precision()), timed=True)
    assert [profile.name for profile in profiles] == ["a", "b", "c"]
    assert [profile.seconds for profile in profiles] == pytest.approx([0.01, 0.03, 0.01])
    assert all(parameter.grad is None for parameter in network.parameters()), "copies were run"


@pytest.mark.parametrize("timed", [True, False])
def test_shapes_and_dtypes_are_found_and_the_network_is_unchanged(timed):
    model = ConvNet(1, 8, 8, 10, channels=[4, 8], kernel_size=3, padding=1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    precision = BFloat16()
    precision.prepare(torch.device("cpu"))
    profiles = partitioning.profile_blocks(
        model, torch.zeros(5, 1, 8, 8), context(precision, channels_last=True), timed
    )
    assert [profile.shape for profile in profiles] == [(5, 4, 4, 4), (5, 8, 2, 2), (5, 50), (5, 10)]
    assert {profile.dtype for profile in profiles} == {torch.bfloat16}
    assert all((profile.seconds > 0) is timed for profile in profiles)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert model.training


CPU = torch.device("cpu")


@pytest.mark.parametrize("channels_last", [True, False])
def test_activations_and_gradients_are_sent_as_contiguous_tensors(channels_last):
    layout = torch.channels_last if channels_last else torch.contiguous_format
    convolutions = [nn.Conv2d(4, 4, 3, padding=1).to(memory_format=layout) for _ in range(2)]
    first, second = (
        StageModule([block], received, sent, channels_last, nullcontext)
        for block, received, sent in zip(convolutions, (False, True), (True, False), strict=True)
    )
    images = torch.randn(2, 4, 6, 5).to(memory_format=layout)
    wanted = convolutions[1](convolutions[0](images))
    gradients = torch.autograd.grad(wanted.square().sum(), [c.weight for c in convolutions])

    sent = first(images)
    assert sent.is_contiguous()
    assert sent.shape == (2, 4, 6, 5)
    assert not sent._is_view(), "a schedule may detach it in place"
    received = sent.detach().clone().requires_grad_()
    outputs = second(received)
    assert torch.equal(outputs, wanted)
    gradient = torch.autograd.grad(outputs.square().sum(), outputs, retain_graph=True)[0]
    outputs.backward(gradient.transpose(-1, -2).contiguous().transpose(-1, -2))  # in another memory format
    assert received.grad.is_contiguous()
    sent.backward(received.grad)
    for convolution, gradient in zip(convolutions, gradients, strict=True):
        torch.testing.assert_close(convolution.weight.grad, gradient)


def test_every_tensor_belongs_to_one_stage():
    model = ResNet(18, num_classes=5)
    model.register_parameter("conv1_extra", nn.Parameter(torch.zeros(())))  # in no block: it belongs to the first stage
    blocks = [block for _, block in model.blocks()]
    owners = partitioning.stages_of_each_tensor(model, [blocks[:3], blocks[3:]])
    assert owners.keys() == {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    assert {name for name, numbers in owners.items() if numbers == [0]} == {
        name for name in owners if name.startswith(("conv1", "bn1.", "layer1."))
    }


@pytest.mark.parametrize(("mode", "devices"), [(ModelParallel(), 2), (Pipeline(engine="streams"), 2), (Pipeline(), 1)])
def test_stages_on_several_devices_of_a_process_share_no_tensor_and_those_of_processes_no_buffer(mode, devices):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[1].weight = model[0].weight
    if devices == 1:
        model.insert(0, model[2])
    session: Any = SimpleNamespace(devices=[CPU] * devices)
    with pytest.raises(ConfigError, match=rf"stages 0 and 1 share 0\.{'weight' if devices == 2 else 'running_mean'}"):
        mode.cut(model, [0, 1], session)


def test_tied_weights_within_a_stage_stay_tied_and_those_of_two_stages_are_in_both():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    owners = partitioning.stages_of_each_tensor(model, [[model[0]], [model[1], model[2]]])
    assert owners == {"0.weight": [0, 1], "0.bias": [0], "1.bias": [1], "2.weight": [1], "2.bias": [1]}
    expected = model[1](model[0](torch.ones(1, 2)))
    owners = partitioning.stages_of_each_tensor(model, [[model[0], model[1]], [model[2]]])
    keep_only(model, {name for name, numbers in owners.items() if numbers == [0]})
    assert torch.equal(model[1](model[0](torch.ones(1, 2))), expected)
    assert model[1].weight is model[0].weight
    assert model[2].weight is None


ONE, TWO = torch.device("cuda", 0), torch.device("cuda", 1)


def test_each_stage_has_a_different_micro_batch_in_each_clock_cycle():
    assert list(clock(3, 2)) == [(0, 0), (1, 0), (0, 1), (2, 0), (1, 1), (2, 1)]


def stages() -> list[StageModule]:
    torch.manual_seed(0)
    blocks = [nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)]
    return [StageModule([block], False, False, False, nullcontext) for block in blocks]


def test_the_recording_has_every_computation():
    timeline = Timeline([CPU])
    timeline.begin(lambda: None)
    engine = StreamEngine(stages(), [CPU] * 3, 4, timeline)
    engine.train(torch.randn(12, 3), torch.randn(12, 2), lambda y, t: (y - t).square().sum())
    assert [span[:3] for span in timeline.take()] == [
        *((stage, "forward", micro) for micro, stage in clock(3, 3)),
        *((2 - stage, "backward", micro) for micro, stage in clock(3, 3)),
    ]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_compute_the_same_as_one():
    for devices in ([ONE, ONE, ONE], [ONE, TWO, TWO]):
        own = [stage.to(device) for stage, device in zip(stages(), devices, strict=True)]
        torch.manual_seed(1)
        inputs, targets = torch.randn(12, 3, device=ONE), torch.randn(12, 2, device=ONE)
        StreamEngine(own, devices, 2, Timeline(devices)).train(inputs, targets, lambda y, t: (y - t).square().sum())
        gradients = [p.grad.cpu() for stage in own for p in stage.parameters() if p.grad is not None]
        if devices[1] == ONE:
            wanted = gradients
    torch.testing.assert_close(gradients, wanted)
