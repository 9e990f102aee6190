"""Tests of `runner.models.torchvision_networks`: the blocks of a network, in sequence, compute the same as it."""

import copy

import pytest
import torch
from torch import nn

from runner.model.base import freeze
from runner.models import torchvision_networks
from runner.models.blocks import blocks_of
from runner.models.torchvision_networks import CHAINS, checkpoint_activations

NETWORKS = (
    "alexnet", "convnext_tiny", "densenet121", "efficientnet_b0", "googlenet", "inception_v3", "mnasnet0_5",
    "mobilenet_v2", "mobilenet_v3_small", "regnet_y_400mf", "resnet18", "shufflenet_v2_x0_5", "squeezenet1_1",
    "swin_t", "swin_v2_t", "vgg11_bn", "vit_b_32",
)  # fmt: skip
"""A network of each class, and another of swin transformers."""
SMALLEST = dict.fromkeys(NETWORKS, 32) | {"alexnet": 64, "inception_v3": 75}
"""The height of images that each can process."""


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


@pytest.mark.parametrize("name", NETWORKS)
def test_blocks_in_sequence_equal_the_network_and_have_each_parameter_once(name):
    """In float64, in which every network has different outputs for the two samples; no block may change its inputs."""
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
    assert list(blocks[-1][1].parameters())[-1] is list(model.parameters())[-1], "the bias of the last layer"


def test_the_classes_of_the_test_networks_list_blocks_and_others_do_not():
    """MaxViT even has a submodule that is named `blocks`."""
    with torch.device("meta"):
        networks = [torchvision_networks.create(name, (3, side, side), 5, {}) for name, side in SMALLEST.items()]
        assert {type(each).__mro__[1] for each in networks} == set(CHAINS)
        model = torchvision_networks.create("maxvit_t", (3, 224, 224), 5, {})
    assert isinstance(model.get_submodule("blocks"), nn.ModuleList)
    assert blocks_of(model) == []


@pytest.mark.parametrize("name", ["shufflenet_v2_x0_5", "convnext_tiny"])
def test_recomputing_activations_changes_neither_gradients_nor_buffers(name):
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
