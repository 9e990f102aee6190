"""Tests of state dicts: what is saved and loaded is what `state_dict()` is, with the versions of its modules."""

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn
from torchvision import models

import runner
from runner.commands import convert
from runner.model.weights import load_weights
from runner.storage import state_dict


class Scaled(nn.Module):
    """A module whose first version saved the weight under another name, and half as large; it refuses to guess."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def _load_from_state_dict(self, *args: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        state, prefix, metadata = args[:3]
        if (version := metadata.get("version")) not in (1, 2):
            raise ValueError(f"version should be set to 1 or 2 instead of {version}")
        if version == 1 and f"{prefix}half" in state:
            state[f"{prefix}weight"] = state.pop(f"{prefix}half") * 2
        super()._load_from_state_dict(*args)


def network() -> nn.Module:
    return nn.Sequential(Scaled(), nn.Linear(3, 2))


def saved(path: Path, prefix: str = "", old: bool = False) -> Path:
    """A file with the weights of a network, of the first version if `old`."""
    model = network()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(5)
    tensors: Any = nn.ModuleDict({"model": model}).state_dict() if prefix == "model." else model.state_dict()
    if old:
        tensors[f"{prefix}0.half"] = tensors.pop(f"{prefix}0.weight") / 2
        tensors._metadata[f"{prefix}0"]["version"] = 1
    if prefix == "module.":
        tensors = state_dict.renamed(tensors, lambda name: prefix + name)
    if path.suffix == ".pt":
        torch.save(tensors, path)
    else:
        safetensors.torch.save_file(tensors, path, state_dict.header(tensors))
    return path


@pytest.mark.cases(
    ("a.pt", "", False),
    ("a.pt", "", True),
    ("a.pt", "model.", True),
    ("a.safetensors", "module.", False),
    ("a.safetensors", "model.", True),
)
def test_initial_weights_are_loaded_with_the_versions_of_their_modules(name, prefix, old, tmp_path):
    model = network()
    load_weights(model, str(saved(tmp_path / name, prefix, old)), False)
    assert all(bool((parameter == 5).all()) for parameter in model.parameters())


def test_a_file_without_versions_has_the_present_ones(tmp_path):
    given, loaded = network(), network()
    torch.nn.init.constant_(given[0].weight, 5.0)  # pyright: ignore[reportArgumentType]
    safetensors.torch.save_file(given.state_dict(), tmp_path / "plain.safetensors")
    load_weights(loaded, str(tmp_path / "plain.safetensors"), False)
    assert all(loaded.state_dict()[name].equal(tensor) for name, tensor in given.state_dict().items())


def test_a_file_that_has_a_tied_weight_once_is_complete(tmp_path):
    def tied() -> nn.Sequential:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, bias=False))
        model[1].weight = model[0].weight
        return model

    model, other = tied(), tied()
    once = {name: tensor for name, tensor in model.state_dict().items() if name != "1.weight"}
    safetensors.torch.save_file(once, tmp_path / "once.safetensors")
    load_weights(other, str(tmp_path / "once.safetensors"), False)
    torch.testing.assert_close(other.state_dict(), model.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_converted_files_keep_versions(suffix, tmp_path):
    source, made = saved(tmp_path / "a.pt", old=True), tmp_path / f"b{suffix}"
    assert convert.main([str(source), str(made), "--module-prefix"]) == 0
    model = nn.ModuleDict({"module": network()})
    model.load_state_dict(torch.load(made) if suffix == ".pt" else state_dict.read(made))
    assert all(bool((parameter == 5).all()) for parameter in model.parameters())


@pytest.mark.usefixtures("elsewhere")
def test_a_network_that_asks_for_its_version_is_resumed_evaluated_and_loaded():
    data = ("data=synthetic", "data.size=32", "data.num_samples=8", "data.holdout=4", "data.num_classes=3")
    options = ("device=cpu", "device.threads=1", *data, "model=torchvision", "model.name=mnasnet0_5", "batch_size=4")
    first = runner.train([*options, "ema.decay=0.5", "steps=1", "proof=false"])  # four values per channel: rounding
    result = runner.train([f"resume={first.directory}", "steps=2"])
    assert result.directory is not None
    run = runner.load(result.directory)
    evaluated = run.evaluate("last")
    assert evaluated["eval/loss"] == result.metrics["eval/loss"]
    plain = models.mnasnet0_5(num_classes=3)
    inputs = torch.randn(2, 3, 32, 32)
    plain.load_state_dict(run.weights("last"))
    torch.testing.assert_close(run.model("last")(inputs), plain.eval()(inputs))
    assert convert.main([str(result.directory), "weights.pt", "--checkpoint", "last"]) == 0
    plain.load_state_dict(torch.load("weights.pt"))
