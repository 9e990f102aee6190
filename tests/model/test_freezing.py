"""Tests of `freeze`: frozen parameters, and batch normalization with frozen parameters."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from runner.config.errors import ConfigError
from runner.model.base import freeze
from runner.models.resnet import ResNet
from runner.parallel.batch_norm import convert_sync_batch_norm, defer


def network() -> ResNet:
    torch.manual_seed(0)
    return ResNet(18, num_classes=5, stem="cifar")


def frozen(patterns: list[str], exceptions: list[str] | None = None) -> set[str]:
    """Return the names of the parameters that `freeze` freezes."""
    model = network()
    freeze(model, patterns, exceptions or [])
    return {name for name, parameter in model.named_parameters() if not parameter.requires_grad}


def test_a_pattern_matches_parameters_modules_and_blocks():
    names = [name for name, _ in network().named_parameters()]
    assert frozen(["conv1.weight"]) == {"conv1.weight"}
    assert frozen(["layer1"]) == {name for name in names if name.startswith("layer1.")}
    assert frozen(["layer[12].0"]) == {name for name in names if name.startswith(("layer1.0.", "layer2.0."))}
    assert frozen(["stem"]) == {"conv1.weight", "bn1.weight", "bn1.bias"}
    assert frozen(["*"], ["head"]) == set(names) - {"fc.weight", "fc.bias"}
    assert frozen(["*.bias"]) == {name for name in names if name.endswith(".bias")}


def test_patterns_that_have_no_effect_are_refused():
    for patterns, exceptions, key, got, suggested in (
        (["layr1"], [], "freeze", "layr1", "layer1"),
        (["*"], ["haed"], "unfreeze", "haed", "head"),
        (["layer1"], ["layer2"], "unfreeze", "layer2", "layer1"),  # layer2 is not frozen
        (["*"], [], "freeze", ["*"], "model.unfreeze=[head]"),
    ):
        with pytest.raises(ConfigError, match="no frozen parameter" if exceptions else None) as refused:
            freeze(network(), patterns, exceptions)
        assert (refused.value.key, refused.value.got) == (key, got)
        assert suggested in refused.value.remedy


def test_frozen_batch_normalization_keeps_its_statistics_and_uses_them():
    model, x = network(), torch.randn(4, 3, 8, 8)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()  # pyright: ignore
            module.running_var.uniform_(0.5, 2)  # pyright: ignore
    reference = copy.deepcopy(model).eval()
    freeze(model, ["*"], ["head"])
    before = copy.deepcopy(dict(model.named_buffers()))
    model.train()
    assert torch.equal(model(x), reference(x))
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    assert list(model.state_dict()) == list(reference.state_dict())


class Halved(nn.BatchNorm2d):
    """Batch normalization with a forward pass of its own, and a submodule, which draws random numbers."""

    def __init__(self, num_features: int):
        super().__init__(num_features)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.drop(super().forward(x).relu() / 2 + self.training)


def test_a_frozen_layer_keeps_its_forward_pass_and_its_hooks():
    torch.manual_seed(0)
    model, x, seen = nn.Sequential(Halved(3), nn.Conv2d(3, 2, 1)), torch.randn(4, 3, 8, 8), []
    norm: Any = model[0]
    norm.running_mean.normal_()
    norm.register_forward_hook(lambda *_: seen.append(1))
    freeze(model, ["0"], [])
    model.train()
    torch.manual_seed(1)
    outputs = norm(x)
    torch.manual_seed(1)
    mean, variance = norm.running_mean.view(1, 3, 1, 1), norm.running_var.view(1, 3, 1, 1)
    wanted = nn.functional.dropout(((x - mean) / (variance + norm.eps).sqrt()).relu() / 2)
    torch.testing.assert_close(outputs, wanted)
    assert seen == [1]
    assert norm.num_batches_tracked == 0


def test_batch_normalization_without_parameters_is_frozen_with_the_module_around_it():
    block, x = nn.Sequential(nn.Conv2d(3, 2, 1), nn.BatchNorm2d(2, affine=False)), torch.randn(4, 3, 8, 8)
    model = nn.Sequential(block, nn.BatchNorm2d(2, affine=False), nn.Conv2d(2, 2, 1))
    freeze(model, ["0"], [])
    model.train()(x)
    assert [int(norm.num_batches_tracked) for norm in (block[1], model[1])] == [0, 1]  # pyright: ignore


@pytest.mark.parametrize("convert", [defer, lambda model: convert_sync_batch_norm(model, torch.device("cpu"))])
def test_batch_normalization_is_frozen_as_a_whole_and_parallel_modes_do_not_convert_it(convert):
    model = network()
    freeze(model, ["*.bias", "layer1"], [])
    assert model.bn1.train()(torch.ones(2, 64, 1, 1)).abs().max() < 0.1, "its weight is trained"
    reference, x = copy.deepcopy(model.layer1).eval(), torch.randn(4, 64, 8, 8)
    convert(model)
    assert torch.equal(model.layer1.train()(x), reference(x))
    for name, tensor in model.layer1.state_dict().items():
        assert torch.equal(tensor, reference.state_dict()[name])
