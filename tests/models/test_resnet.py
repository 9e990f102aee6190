import pytest
import torch
import torchvision
from torch import nn
from torch.nn.functional import cross_entropy

from runner.models.resnet import ResNet


@pytest.mark.parametrize("depth", [18, 34, 50, 101, 152])
def test_names_and_shapes_are_those_of_torchvision(depth):
    with torch.device("meta"):
        networks = ResNet(depth), torchvision.models.get_model(f"resnet{depth}")
    ours, theirs = ([(name, tensor.shape) for name, tensor in each.state_dict().items()] for each in networks)
    assert ours == theirs


@pytest.mark.parametrize("depth", [18, 50])
def test_weights_outputs_gradients_and_statistics_are_those_of_torchvision_with_the_same_seed(depth):
    torch.manual_seed(0)
    ours = ResNet(depth, num_classes=10)
    torch.manual_seed(0)
    theirs = torchvision.models.get_model(f"resnet{depth}", num_classes=10)
    x, y = torch.randn(4, 3, 48, 48), torch.tensor([0, 3, 9, 3])
    results = []
    for network in (ours, theirs):
        before = [tensor.clone() for tensor in network.state_dict().values()]
        output = network(x)
        cross_entropy(output, y).backward()
        gradients = [p.grad for p in network.parameters()]
        results.append([*before, output, network.eval()(x), *gradients, *network.buffers()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_the_blocks_have_each_parameter_once_and_contain_a_replaced_layer():
    network = nn.SyncBatchNorm.convert_sync_batchnorm(ResNet(18))
    in_stages = [id(p) for _, stage in network.blocks() for p in stage.parameters()]
    assert in_stages == [id(p) for p in network.parameters()]
    assert isinstance(dict(network.blocks())["stem"].get_submodule("bn1"), nn.SyncBatchNorm)


@pytest.mark.parametrize(
    ("channels", "stem", "norm"), [(1, "imagenet", "batch"), (3, "cifar", "group"), (4, "imagenet", "group")]
)
def test_any_number_of_channels_works_with_any_stem_and_norm(channels, stem, norm):
    torch.manual_seed(0)
    network, x = ResNet(18, channels, 7, stem, norm), torch.randn(2, channels, 32, 32)
    assert network(x).shape == (2, 7)
    side, kernel = (32, 3) if stem == "cifar" else (8, 7)
    assert dict(network.blocks())["stem"](x).shape == (2, 64, side, side)
    # He initialization with fan-out: a variance of 2 / (64 channels × kernel²)
    assert network.conv1.weight.std().item() == pytest.approx((2 / (64 * kernel**2)) ** 0.5, rel=0.05)
    assert network.conv1.weight.shape[1] == channels
