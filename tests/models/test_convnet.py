import pytest
import torch
import torch.nn.functional as F

from runner.models.blocks import blocks_of
from runner.models.convnet import ConvNet


def by_hand(weights: dict[str, torch.Tensor], x: torch.Tensor, padding: int = 0) -> torch.Tensor:
    """Compute the forward pass of the network with functions of torch."""
    for conv in ("conv1", "conv2"):
        x = F.conv2d(x, weights[f"{conv}.conv.weight"], weights[f"{conv}.conv.bias"], padding=padding)
        x = F.max_pool2d(F.relu(x), 2)
    x = x.reshape(len(x), -1)
    x = F.relu(x @ weights["hidden.fc.weight"].T + weights["hidden.fc.bias"])
    return x @ weights["head.fc.weight"].T + weights["head.fc.bias"]


@pytest.mark.parametrize(
    ("shape", "options"),
    [((2, 17, 31), {}), ((1, 8, 8), {"channels": (16, 32), "kernel_size": 3, "padding": 1, "hidden": 64})],
)
def test_outputs_equal_those_of_plain_torch_functions(shape, options):
    torch.manual_seed(0)
    network = ConvNet(*shape, 10, **options)
    x = torch.randn(4, *shape)
    expected = by_hand(dict(network.named_parameters()), x, options.get("padding", 0))
    torch.testing.assert_close(network(x), expected)


@pytest.mark.parametrize(("count", "kernel_size", "padding", "least"), [(2, 5, 0, 16), (3, 5, 0, 36), (2, 3, 1, 4)])
def test_smallest_input_leaves_one_pixel_and_a_smaller_one_is_refused(count, kernel_size, padding, least):
    options = {"channels": (3,) * count, "kernel_size": kernel_size, "padding": padding}
    network = ConvNet(1, least, least, 10, **options)
    assert network(torch.randn(2, 1, least, least)).shape == (2, 10)
    assert network.state_dict()["hidden.fc.weight"].shape[1] == 3
    with pytest.raises(ValueError, match=f"{least}×{least - 1} are too small"):
        ConvNet(1, least, least - 1, 10, **options)


def test_blocks_in_sequence_equal_the_network_and_have_each_parameter_once():
    network, x = ConvNet(1, 28, 28, 10), torch.randn(3, 1, 28, 28)
    before = torch.get_rng_state()
    expected = network(x)
    assert torch.equal(torch.get_rng_state(), before), "no random number is drawn without dropout"
    for _, stage in blocks_of(network):
        x = stage(x)
    assert torch.equal(x, expected)
    assert [name for name, _ in blocks_of(network)] == ["conv1", "conv2", "hidden", "head"]
    in_stages = [id(p) for _, stage in blocks_of(network) for p in stage.parameters()]
    assert in_stages == [id(p) for p in network.parameters()]
