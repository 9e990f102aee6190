"""Tests of `models.torchvision_networks`: the blocks of a network, run in sequence, compute the same as the network."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from models import torchvision_networks
from models.blocks import blocks_of
from models.torchvision_networks import CHAINS, checkpoint_activations
from runner.model.base import freeze

SMALLEST = {
    "alexnet": 64,
    "convnext_tiny": 32,
    "densenet121": 32,
    "efficientnet_b0": 32,
    "googlenet": 32,
    "inception_v3": 75,
    "mnasnet0_5": 32,
    "mobilenet_v2": 32,
    "mobilenet_v3_small": 32,
    "regnet_y_400mf": 32,
    "resnet18": 32,
    "resnext50_32x4d": 32,
    "shufflenet_v2_x0_5": 32,
    "squeezenet1_1": 32,
    "swin_t": 32,
    "swin_v2_t": 32,
    "vgg11_bn": 32,
    "vit_b_32": 32,
}
"""A network of each class, and the height of images that it can process."""


def network(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return the network `name` with noise added to constant tensors, such as biases and running statistics."""
    torch.manual_seed(0)
    side = SMALLEST[name]
    model = torchvision_networks.create(name, (2, side, side), 5, {}).to(dtype)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point() and tensor.min() == tensor.max():
            tensor.detach().add_(torch.rand_like(tensor), alpha=0.05)
    return model.eval()


def inputs(name: str) -> torch.Tensor:
    return torch.randn(2, 2, SMALLEST[name], SMALLEST[name], generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", SMALLEST)
def test_blocks_in_sequence_equal_the_network_and_have_each_parameter_once(name: str) -> None:
    """In float64, in which every network has different outputs for the two samples.

    The first block of a pipeline stage has inputs that require gradients, and must not change them in place.
    """
    model, x = network(name, torch.float64), inputs(name).double()
    wanted, blocks = model(x).detach(), blocks_of(model)
    for _, block in blocks:
        given = x.detach().requires_grad_()
        x = block(given)
        x.sum().backward(inputs=[given])
        assert given.grad is not None
    assert wanted.shape == (2, 5)
    assert torch.equal(x, wanted)
    assert x.isfinite().all()
    assert not torch.equal(x[0], x[1])
    held = [id(parameter) for _, block in blocks for parameter in block.parameters()]
    assert sorted(held) == sorted(id(parameter) for parameter in model.parameters())
    names = [block for block, _ in blocks]
    assert len(set(names)) == len(names)
    freeze(model, ["*"], ["head"])  # which replaces batch normalization
    assert [block for block, _ in blocks_of(model)] == names
    assert (names[0], names[-1]) == ("stem", "head")
    bias = list(model.parameters())[-1]
    assert bias.shape == (5,), "that of the last layer"
    assert id(bias) in {id(parameter) for parameter in blocks[-1][1].parameters()}


def test_the_classes_of_the_test_networks_list_blocks_and_others_do_not() -> None:
    """MaxViT even has a submodule that is named `blocks`."""
    with torch.device("meta"):
        networks = [torchvision_networks.create(name, (3, side, side), 5, {}) for name, side in SMALLEST.items()]
        assert {type(each).__mro__[1] for each in networks} == set(CHAINS)
        model = torchvision_networks.create("maxvit_t", (3, 224, 224), 5, {})
    assert isinstance(model.get_submodule("blocks"), nn.ModuleList)
    assert blocks_of(model) == []


@pytest.mark.parametrize("name", ["shufflenet_v2_x0_5", "convnext_tiny"])
def test_recomputing_activations_changes_neither_gradients_nor_buffers(name: str) -> None:
    plain, x = network(name).train(), inputs(name)
    recomputed = copy.deepcopy(plain)
    assert checkpoint_activations(recomputed) > 10
    for model in (plain, recomputed):
        torch.manual_seed(2)
        model(x).square().sum().backward()
    for one, other in zip(plain.parameters(), recomputed.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)  # pyright: ignore
    for one, other in zip(plain.buffers(), recomputed.buffers(), strict=True):
        assert torch.equal(one, other)
    assert [block for block, _ in blocks_of(recomputed)] == [block for block, _ in blocks_of(plain)]
