"""Tests of stages: the activations that are sent, the tensors of each stage, and the engine that has all of them."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from models.resnet import ResNet
from runner.config.errors import ConfigError
from runner.parallel.pipelining.partition import Partition
from runner.parallel.pipelining.stages import StageModule, keep_only
from runner.parallel.pipelining.streams import StreamEngine, clock
from runner.parallel.pipelining.timeline import Timeline

CPU = torch.device("cpu")


@pytest.mark.parametrize("channels_last", [True, False])
def test_activations_and_gradients_are_sent_as_contiguous_tensors(channels_last: bool) -> None:
    layout = torch.channels_last if channels_last else torch.contiguous_format
    convolutions = [nn.Conv2d(4, 4, 3, padding=1).to(memory_format=layout) for _ in range(2)]  # type: ignore[call-overload]
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
    assert received.grad is not None
    assert received.grad.is_contiguous()
    sent.backward(received.grad)
    for convolution, gradient in zip(convolutions, gradients, strict=True):
        torch.testing.assert_close(convolution.weight.grad, gradient)


def test_every_tensor_belongs_to_one_stage() -> None:
    model = ResNet(18, num_classes=5)
    model.register_parameter("conv1_extra", nn.Parameter(torch.zeros(())))  # in no block: it belongs to the first stage
    blocks = [block for _, block in model.blocks()]
    owner = Partition().stage_of_each_tensor(model, [blocks[:3], blocks[3:]])
    assert owner.keys() == {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    assert {name for name, number in owner.items() if number == 0} == {
        name for name in owner if name.startswith(("conv1", "bn1.", "layer1."))
    }


def test_shared_weights_are_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    with pytest.raises(ConfigError, match=r"stages 0 and 1 share 0\.weight"):
        Partition().stage_of_each_tensor(model, [[model[0]], [model[1]]])


def test_tied_weights_within_a_stage_stay_tied() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    expected = model[1](model[0](torch.ones(1, 2)))
    owner = Partition().stage_of_each_tensor(model, [[model[0], model[1]], [model[2]]])
    keep_only(model, {name for name, number in owner.items() if number == 0})
    assert torch.equal(model[1](model[0](torch.ones(1, 2))), expected)
    assert model[1].weight is model[0].weight
    assert model[2].weight is None


# ---------------------------------------------------------------------------------------------------------------------
# The engine for one process with streams

ONE, TWO = torch.device("cuda", 0), torch.device("cuda", 1)


def test_each_stage_has_a_different_micro_batch_in_each_clock_cycle() -> None:
    assert list(clock(3, 2)) == [(0, 0), (1, 0), (0, 1), (2, 0), (1, 1), (2, 1)]


def stages() -> list[StageModule]:
    torch.manual_seed(0)
    blocks = [nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)]
    return [StageModule([block], False, False, False, nullcontext) for block in blocks]


def test_the_recording_has_every_computation() -> None:
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
def test_two_gpus_compute_the_same_as_one() -> None:
    for devices in ([ONE, ONE, ONE], [ONE, TWO, TWO]):
        own = [stage.to(device) for stage, device in zip(stages(), devices, strict=True)]
        torch.manual_seed(1)
        inputs, targets = torch.randn(12, 3, device=ONE), torch.randn(12, 2, device=ONE)
        StreamEngine(own, devices, 2, Timeline(devices)).train(inputs, targets, lambda y, t: (y - t).square().sum())
        gradients = [p.grad.cpu() for stage in own for p in stage.parameters() if p.grad is not None]
        if devices[1] == ONE:
            wanted = gradients
    torch.testing.assert_close(gradients, wanted)
