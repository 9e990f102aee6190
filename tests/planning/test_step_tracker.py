"""Tests of the operations that a plan counts."""

from math import prod

import pytest
import torch
from torch import nn

from runner.planning.step_tracker import StepTracker


@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("first", [True, False], ids=["first layer", "later layer"])
@pytest.mark.cases(
    (nn.Conv1d, {}, (9,)),
    (nn.Conv2d, {"dilation": 2}, (9, 7)),
    (nn.Conv2d, {"stride": 2}, (9, 7)),
    (nn.Conv3d, {}, (4, 5, 6)),
    (nn.ConvTranspose2d, {"stride": 2}, (4, 5)),
    (nn.ConvTranspose2d, {"dilation": 2}, (4, 5)),
    (nn.ConvTranspose3d, {"stride": (1, 2, 1)}, (2, 3, 4)),
)
def test_operations_of_convolutions_are_those_of_each_group(kind, options, size, groups, first):
    """Each element of the input (transposed) or of the output has as many products as a filter of a group has."""
    layer = kind(8, 16, 3, padding=0, groups=groups, **options)
    x = torch.randn(5, 8, *size, requires_grad=not first)
    with StepTracker(fake_mode=object()) as tracker:
        outputs = layer(x)
        outputs.sum().backward()
    if layer.transposed:
        products = 5 * 8 * prod(size) * (16 // groups) * prod(layer.kernel_size)
    else:
        products = 5 * 16 * prod(outputs.shape[2:]) * (8 // groups) * prod(layer.kernel_size)
    backward = products * (1 if first else 2)  # of data, there is no gradient
    assert tracker.costs.flops - tracker.costs.backward_flops == 2 * products
    assert tracker.costs.backward_flops == 2 * backward
