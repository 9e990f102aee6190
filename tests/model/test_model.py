from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from helpers.compose import option_content
from safetensors.torch import save_file

from runner.config.errors import ConfigError
from runner.config.schema import build
from runner.model.base import Model
from runner.model.networks import GPT, ConvNet, NatureCNN, ResNet
from runner.model.weights import read_weights
from runner.models import convnet, resnet

SHAPE = (1, 28, 28)


def option(name: str, **changes: object) -> Model:
    """Return the component that conf/model/`name`.yaml describes, with `changes`."""
    return build(option_content("model", name) | changes, Model, "model")


def small(classes: int = 10, seed: int = 0) -> convnet.ConvNet:
    torch.manual_seed(seed)
    return convnet.ConvNet(*SHAPE, classes)


def refusal(shape: tuple[int, int, int] = SHAPE, **options: object) -> ConfigError:
    with pytest.raises(ConfigError) as error:
        ConvNet(**options).build(shape, 10)
    return error.value


def test_options_are_passed_to_the_network():
    net = option("convnet", dropout=0.5, checkpoint_activations=True).build(SHAPE, 10)
    deep = option("resnet18", stem="cifar", norm="group", checkpoint_activations=True).build((2, 32, 32), 10)
    assert isinstance(net, convnet.ConvNet)
    assert net.get_submodule("hidden.dropout").p == 0.5
    assert all(stage.checkpoint_activations for _, stage in net.named_children())
    assert isinstance(deep, resnet.ResNet)
    assert all(stage.checkpoint_activations for _, stage in deep.blocks())
    assert isinstance(deep.maxpool, torch.nn.Identity)
    assert isinstance(deep.bn1, torch.nn.GroupNorm)
    assert deep.conv1.in_channels == 2


@pytest.mark.cases(
    (ConvNet, {"channels": ()}, "channels"),
    (NatureCNN, {"strides": (4, 2)}, "strides"),
    (GPT, {"heads": 5}, "heads"),
    (GPT, {"heads": 256}, "heads"),  # of three features, and pairs are rotated
    (GPT, {"kv_heads": 5}, "kv_heads"),
    (ConvNet, {"weights": "absent.pt"}, "weights"),
    (ResNet, {"reset_head": True}, "reset_head"),
)
def test_an_invalid_value_is_refused_by_its_key(cls, options, key):
    with pytest.raises(ConfigError) as error:
        cls(**options)
    assert error.value.key == key


def test_inputs_of_another_size_than_the_network_can_take_are_refused_by_key():
    error = refusal(shape=(1, 8, 8))
    assert (error.key, error.got) == ("kernel_size", 5)
    with pytest.raises(ConfigError) as refused:
        option("gpt_tiny").build((257,), 257)
    assert (refused.value.key, refused.value.got) == ("context", 256)


@pytest.mark.parametrize(("name", "vocabulary", "count"), [("gpt2", 50257, 124_439_808), ("gpt_tiny", 257, 357_120)])
def test_language_models_have_the_sizes_of_their_names(name, vocabulary, count):
    with torch.device("meta"):
        network = option(name).build((256,), vocabulary)
    assert sum(each.numel() for each in network.parameters()) == count


def spellings(state: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return the contents of files with `state` in every format, by the names of the files."""
    wrapped = {f"module.{name}": tensor for name, tensor in state.items()}
    return {
        "plain.pt": state,
        "plain.safetensors": state,
        "dataparallel.pt": wrapped,
        "compiled_ddp.pt": {f"module._orig_mod.{name}": tensor for name, tensor in state.items()},
        "compiled_blocks.pt": {name.replace(".", "._orig_mod.", 1): tensor for name, tensor in state.items()},
        "averaged.pt": {"n_averaged": torch.tensor(3), **wrapped},
        "state_dict.pt": {"epoch": 3, "state_dict": wrapped, "best": 0.5},
        "model_state_dict.pt": {"model_state_dict": state, "optimizer_state_dict": {"lr": 0.1}},
        "model.pt": {"model": state},
        "auxiliary.pt": state | {"AuxLogits.fc.weight": torch.zeros(3)},
        "half.pt": {name: tensor.half() for name, tensor in state.items()},
        "lightning.ckpt": {"state_dict": {f"net.{name}": tensor for name, tensor in state.items()}},
    }


def spelled(folder: Path, spelling: str, state: dict[str, torch.Tensor]) -> str:
    """Write `state` to the file `spelling` in `folder`, in the format that its name stands for, and return its path."""
    path = folder / spelling
    (save_file if path.suffix == ".safetensors" else torch.save)(spellings(state)[spelling], path)
    return str(path)


@pytest.mark.parametrize("spelling", spellings({}))
def test_weights_load_from_every_supported_format(tmp_path, spelling):
    saved = small(seed=4).state_dict()
    path = spelled(tmp_path, spelling, saved)
    loaded = ConvNet(weights=path).build(SHAPE, 10).state_dict()
    if not spelling.endswith((".safetensors", ".ckpt")):  # the former sorts the names
        assert list(read_weights(path))[: len(saved)] == list(saved)
    for name, tensor in saved.items():
        assert torch.equal(loaded[name], tensor.half().float() if spelling == "half.pt" else tensor)


def test_torchvision_weights_load_with_and_without_num_batches_tracked(tmp_path):
    theirs = torchvision.models.resnet18(weights=None)
    theirs.bn1.running_mean.fill_(0.25)
    state = theirs.state_dict()
    torch.save(state, tmp_path / "new.pth")
    save_file({name: t for name, t in state.items() if "num_batches" not in name}, tmp_path / "old.safetensors")
    for name in ("new.pth", "old.safetensors"):
        ours = ResNet(depth=18, weights=str(tmp_path / name)).build((3, 64, 64), 1000).state_dict()
        assert all(torch.equal(ours[key], state[key]) for key in state)


def test_a_head_for_other_classes_is_refused_unless_reset_head_is_set(tmp_path):
    state = small(classes=7, seed=4).state_dict()
    path = spelled(tmp_path, "dataparallel.pt", state)
    error = refusal(weights=path)
    assert "head.fc.weight [7, 50] instead of [10, 50]" in error.why
    assert "model.reset_head=true" in error.remedy
    torch.manual_seed(0)
    loaded, fresh = ConvNet(weights=path, reset_head=True).build(SHAPE, 10).state_dict(), small().state_dict()
    for name, tensor in loaded.items():
        assert torch.equal(tensor, fresh[name] if name.startswith("head.") else state[name])


def test_reset_head_needs_a_network_with_blocks(tmp_path):
    class Bare(Model):
        def network(self, shape: tuple[int, int, int], num_classes: int) -> torch.nn.Module:
            return torch.nn.Linear(3, num_classes)

    path = spelled(tmp_path, "plain.pt", torch.nn.Linear(3, 10).state_dict())
    assert Bare(weights=path).build((1, 1, 3), 10)(torch.zeros(1, 3)).shape == (1, 10)
    with pytest.raises(ConfigError, match="reset_head: got True"):
        Bare(weights=path, reset_head=True).build((1, 1, 3), 10)


def test_weights_of_another_network_are_refused_with_three_names_each(tmp_path):
    state = small().state_dict()
    renamed = {name.replace("conv", "block"): tensor for name, tensor in state.items()}
    renamed["hidden.fc.weight"] = torch.zeros(50, 500)
    error = refusal(weights=spelled(tmp_path, "plain.pt", renamed))
    assert "4 missing: conv1.conv.weight, conv1.conv.bias, conv2.conv.weight;" in error.why
    assert "4 unexpected: block1.block.weight, block1.block.bias, block2.block.weight;" in error.why
    assert "hidden.fc.weight [50, 500] instead of [50, 320]" in error.why
    assert "reset_head" not in error.remedy


class Marker:
    """A class that is not allowed in a weights file, because unpickling it may run code."""


@pytest.mark.cases(
    {"weights": Marker()},
    [1, 2],
    {},
    {"state_dict": {}},
    {"epoch": 3},
    {1: torch.zeros(1)},
    torch.zeros(3),
    ids=["class", "list", "empty", "nested", "number", "index", "tensor"],
)
def test_a_file_without_a_state_dict_is_refused(content, tmp_path):
    path = str(tmp_path / "weights.pt")
    torch.save(content, path)
    error = refusal(weights=path)
    assert (error.key, error.got) == ("weights", path)
    assert ("UnpicklingError: it contains" if "Marker" in str(content) else "state_dict") in error.why
