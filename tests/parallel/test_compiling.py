"""Tests of `compile`: torch compiles nothing, the network, or each of its blocks."""

import pytest
import torch
from helpers.compose import TINY_CPU, build_composed_run, prepare_session

from runner.config.errors import ConfigError
from runner.models.convnet import ConvNet
from runner.models.resnet import ResNet
from runner.parallel.compiling import compile_in_place, modules_of_blocks


@pytest.fixture
def compiled(monkeypatch) -> list[torch.nn.Module]:
    """Replace `torch.nn.Module.compile` by a function that only records the module, and return the recorded modules."""
    modules: list[torch.nn.Module] = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: modules.append(self))
    return modules


def resnet() -> ResNet:
    with torch.device("meta"):
        return ResNet(18, num_classes=10)


def test_modules_of_blocks_are_the_blocks_that_are_submodules():
    network = ConvNet(1, 8, 8, 10, channels=(4, 4), kernel_size=3, padding=1, hidden=8)
    assert modules_of_blocks(network) == list(network.children())
    residual = resnet()
    names = {id(module): name for name, module in residual.named_modules()}
    found = [names[id(block)] for block in modules_of_blocks(residual)]
    assert found == [f"layer{layer}.{index}" for layer in (1, 2, 3, 4) for index in (0, 1)], "stem and head are views"


def test_the_network_or_each_of_its_blocks_is_compiled(compiled):
    from torch._dynamo import config

    network = resnet()
    compile_in_place(network, False)
    assert compiled == []
    compile_in_place(network, True)
    assert compiled == [network]
    compiled.clear()
    with config.patch(recompile_limit=8):
        compile_in_place(network, "blocks")
        assert compiled == modules_of_blocks(network)
        assert config.recompile_limit >= 2 * 8, "all variants of the blocks"
        compiled.clear()
        compile_in_place(torch.nn.Sequential(network.layer1, network.fc), "blocks", [network.layer1, network.fc])
        assert compiled == [network.layer1, network.fc]
    with pytest.raises(ConfigError) as refusal:
        compile_in_place(torch.nn.Linear(2, 2), "blocks")
    assert (refusal.value.key, refusal.value.got) == ("compile", "blocks")


@pytest.mark.parametrize("overrides", [(), ("parallel=pipeline", "parallel.engine=streams")], ids=["single", "streams"])
def test_a_mode_compiles_the_blocks_of_its_network(overrides, compiled):
    run = build_composed_run(*TINY_CPU, "compile=blocks", *overrides)
    session = prepare_session(run)
    model = run.parallel.place(run.workload.build_model(), session)
    assert compiled == modules_of_blocks(model)
    assert not any("_orig_mod" in key for key in model.state_dict())
