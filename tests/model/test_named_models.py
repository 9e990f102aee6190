"""Tests of `model=torchvision` and `model=timm`, which build networks by their names."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
import torchvision

from runner.config.errors import ConfigError
from runner.model import networks
from runner.model.networks import Timm, Torchvision
from runner.system.fake_tensors import fake_tensors

SMALL = "shufflenet_v2_x0_5"


def refusal(shape: tuple[int, int, int] = (3, 32, 32), **options: Any) -> ConfigError:
    with pytest.raises(ConfigError) as refused:
        Torchvision(**options).build(shape, 10)
    return refused.value


def test_weights_are_those_of_torchvision_with_the_same_seed():
    torch.manual_seed(3)
    ours = Torchvision(name=SMALL).build((3, 32, 32), 7)
    torch.manual_seed(3)
    theirs = torchvision.models.get_model(SMALL, num_classes=7).state_dict()
    assert list(ours.state_dict()) == list(theirs)
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.state_dict().items())
    assert ours.training


def test_networks_have_the_channels_and_the_size_of_the_images():
    model = Torchvision(name=SMALL).build((4, 32, 32), 10)
    first = model.get_submodule("conv1.0")
    assert isinstance(first, torch.nn.Conv2d)
    assert (first.in_channels, first.stride, first.padding, first.bias) == (4, (2, 2), (1, 1), None)
    assert model(torch.zeros(2, 4, 32, 32)).shape == (2, 10)
    with torch.device("meta"):
        model = Torchvision(name="vit_b_32", options={"dropout": 0.25}).build((3, 64, 64), 10)
    assert model.get_parameter("encoder.pos_embedding").shape == (1, 1 + 4, 768)
    assert model.get_submodule("encoder.dropout").p == 0.25


def test_a_network_whose_widths_are_computed_with_tensors_works_with_fake_tensors():
    with fake_tensors():
        model = Torchvision(name="regnet_y_400mf").build((3, 64, 64), 10)
        assert model(torch.zeros(2, 3, 64, 64)).shape == (2, 10)


@pytest.mark.cases(
    ("vit_b16", (3, 32, 32), {}, "no network of this name"),
    ("squeezenet1_1", (3, 32, 32), {"dropout": "high"}, "TypeError"),
    ("squeezenet1_1", (3, 32, 32), {"num_classes": 3}, "multiple values for keyword argument 'num_classes'"),
    ("squeezenet1_1", (3, 32, 32), {"weights": "DEFAULT"}, "multiple values for keyword argument 'weights'"),
    ("squeezenet1_1", (3, 32, 32), {"pretrained": True}, "unexpected keyword argument 'pretrained'"),
    ("vgg11", (3, 8, 8), {}, "for images of 3×8×8"),
    ("vit_b_32", (3, 64, 32), {}, "for images of 3×64×32"),
)
def test_what_torchvision_cannot_build_is_refused(name, shape, options, why):
    with torch.device("meta"):
        error = refusal(shape, name=name, options=options)
    assert (error.key, error.got) == ("name", name)
    assert why in error.why
    assert name != "vit_b16" or "vit_b_16" in error.remedy


def test_checkpoint_activations_needs_a_network_with_blocks():
    model = Torchvision(name=SMALL, checkpoint_activations=True).build((3, 32, 32), 10)
    assert model.get_submodule("stage2.1").checkpoint_activations
    assert refusal((3, 64, 64), name="alexnet", checkpoint_activations=True).key == "checkpoint_activations"


@pytest.fixture
def timm(monkeypatch) -> list[dict[str, Any]]:
    """Install a fake package `timm` with two functions, and return the list of the calls of `create_model`."""
    calls: list[dict[str, Any]] = []

    def create_model(name: str, **options: Any) -> torch.nn.Module:
        calls.append({"name": name, **options})
        if "act_layer" in options:
            raise KeyError(options["act_layer"])
        return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.LazyLinear(options["num_classes"]))

    package: Any = ModuleType("timm")
    package.list_models, package.create_model = lambda: ["resnet18", "vit_tiny_patch16_224"], create_model
    monkeypatch.setitem(sys.modules, "timm", package)
    monkeypatch.setattr(networks, "is_installed", lambda name: name == "timm")
    return calls


def test_timm_downloads_nothing_and_wrong_names_and_arguments_are_refused(timm):
    for options, key in (
        ({"name": "hf-hub:someone/resnet18"}, "name"),
        ({"options": {"pretrained": True}}, "options.pretrained"),
        ({"options": {"pretrained_cfg": {"url": "https://example.org/a.pth"}}}, "options.pretrained_cfg"),
        ({"options": {"pretrained_cfg_overlay": {"file": "/a.pth"}}}, "options.pretrained_cfg_overlay"),
        ({"options": {"drop_rate": 0.1, "cache_dir": "/a"}}, "options.cache_dir"),
        ({"options": {"checkpoint_path": "/a.pth"}}, "options.checkpoint_path"),
        ({"name": "local-dir:/a"}, "name"),
        ({"checkpoint_activations": True}, "checkpoint_activations"),
    ):
        with pytest.raises(ConfigError) as refused:
            Timm(**options).build((1, 8, 8), 10)
        assert refused.value.key == key
    assert timm == []
    Timm(options={"drop_rate": 0.1}).build((1, 8, 8), 10)
    assert timm == [{"name": "resnet18", "pretrained": False, "num_classes": 10, "in_chans": 1, "drop_rate": 0.1}]
    with pytest.raises(ConfigError) as refused:
        Timm(options={"act_layer": "rleu"}).build((1, 8, 8), 10)
    assert "(KeyError: 'rleu')" in refused.value.why
