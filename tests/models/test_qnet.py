"""Tests of the Q-networks against plain torch."""

import torch
from torch import nn

from runner.models.blocks import blocks_of
from runner.models.qnet import Dueling, QNet, WithTarget


def test_dueling_values_are_state_value_plus_centered_advantages():
    head = Dueling(2, 3)
    x = torch.randn(5, 2)
    value, advantages = head.value(x).tolist(), head.advantage(x).tolist()
    wanted = [[value[i][0] + advantages[i][a] - sum(advantages[i]) / 3 for a in range(3)] for i in range(5)]
    torch.testing.assert_close(head(x), torch.tensor(wanted))
    assert isinstance(QNet(4, 3, (8,), dueling=True)[-1], Dueling)


def test_the_network_equals_plain_torch_with_and_without_recomputation():
    net, again = QNet(4, 2, (8, 6)), QNet(4, 2, (8, 6), checkpoint_activations=True)
    again.load_state_dict(net.state_dict())
    plain = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2))
    plain.load_state_dict(dict(zip(plain.state_dict(), net.state_dict().values(), strict=True)))
    x = torch.randn(3, 4)
    for other in (net, again):
        other.zero_grad()
        torch.testing.assert_close(other(x), plain(x))
        other(x).square().sum().backward()
    for a, b in zip(net.parameters(), again.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)  # pyright: ignore
    image = x.view(3, 1, 2, 2)  # flattened by the first block, so that the blocks can be run one by one
    for _, block in blocks_of(net):
        image = block(image)
    assert torch.equal(image, net(x))
    assert QNet(4, 2, ())(x.view(3, 1, 2, 2)).shape == (3, 2)


def test_observations_of_any_shape_are_normalized_by_component():
    shift, scale, flat = torch.randn(6), torch.rand(6), torch.randn(3, 6)
    grids, wanted = flat.view(3, 2, 3), (flat - shift) * scale
    assert torch.equal(WithTarget(nn.Identity(), shift, scale)(grids), wanted.view(3, 2, 3))
    model = WithTarget(QNet(6, 2, (4,)), shift, scale)
    for ours, others in zip(model(grids, grids), model(flat, flat), strict=True):
        assert torch.equal(ours, others)
    assert torch.equal(model(grids), model.online(wanted))
