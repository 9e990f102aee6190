"""Tests of `freeze`: frozen parameters, and batch normalization with frozen parameters."""

import copy

import pytest
import torch
from torch import nn

from runner.config.errors import ConfigError
from runner.model.base import freeze
from runner.models.layers import FrozenBatchNorm
from runner.models.resnet import ResNet
from runner.parallel import batch_norm
from runner.parallel.batch_norm import convert_sync_batch_norm


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


def test_batch_normalization_is_frozen_as_a_whole_and_parallel_modes_do_not_convert_it():
    model = network()
    freeze(model, ["*.bias", "layer1"], [])
    assert type(model.bn1) is nn.BatchNorm2d, "its weight is trained"
    convert_sync_batch_norm(model, torch.device("cpu"))
    batch_norm.defer(model)
    assert type(model.get_submodule("layer1.0.bn1")) is FrozenBatchNorm
    assert type(model.get_submodule("layer2.0.bn1")) is batch_norm.DeferredBatchNorm
