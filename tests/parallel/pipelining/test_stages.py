"""Tests of stages: the format of the activations that are sent, and the tensors that belong to each stage."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from models.resnet import ResNet
from runner.config.errors import ConfigError
from runner.parallel.pipelining.partition import Partition
from runner.parallel.pipelining.stages import ActivationSpec, StageModule, keep_only

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
    assert sent.shape == ActivationSpec((4, 6, 5), torch.float32).empty(2, CPU).shape == (2, 4, 6, 5)
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


def test_tensors_of_other_stages_are_removed_and_the_rest_keep_their_names() -> None:
    model = ResNet(18, num_classes=5)
    kept = {name for name in model.state_dict() if name.startswith(("layer4.", "fc."))}
    before = {name: model.state_dict()[name].clone() for name in kept}
    keep_only(model, kept)
    assert model.state_dict().keys() == kept
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert {name for name, _ in model.named_parameters()} <= kept
    head = model.blocks()[-1][1]
    assert head(torch.zeros(2, 512, 1, 1)).shape == (2, 5)
