"""Tests of fake tensors, which have no values, and of fake process groups, which have no other ranks."""

import copy
from typing import Any

import pytest
import torch
from helpers.compose import build_composed_run
from torch import distributed, nn
from torch._subclasses import fake_tensor

from runner.config.options import option_files
from runner.system.fake_tensors import build_with_values, fake_process_group, fake_tensors
from runner.system.torch_errors import refusal


def test_a_module_is_moved_converted_and_copied_without_values():
    with fake_tensors() as mode:
        network = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4))
        network.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        assert network[0].weight.is_contiguous(memory_format=torch.channels_last)  # pyright: ignore
        assert isinstance(network[0].weight, torch.nn.Parameter)
        copied = copy.deepcopy(network.double())
        assert all(getattr(tensor, "fake_mode", None) is mode for tensor in copied.state_dict().values())
        assert copied[0].weight is not network[0].weight
        assert copied[0].weight.dtype == torch.float64
        assert isinstance(copied[0].weight, torch.nn.Parameter)


def test_collectives_of_a_fake_group_return_at_once_and_the_patches_of_torch_are_undone_afterwards():
    before = torch.nn.Module._apply
    with fake_process_group(1, 3):
        assert (distributed.get_rank(), distributed.get_world_size()) == (1, 3)
        tensor = torch.ones(2)
        distributed.all_reduce(tensor)
        assert tensor.tolist() == [1, 1]
        with fake_tensors():
            pass
    assert torch.nn.Module._apply is before
    assert not distributed.is_initialized()
    assert torch.nn.Linear(2, 2).to(torch.float64).weight.any()


@pytest.mark.parametrize("optimizer", option_files()["optimizer"])
@pytest.mark.parametrize("fused", ["true", "false"])
def test_optimizers_update_fake_tensors_without_creating_real_tensors(optimizer, fused, monkeypatch):
    def fail(_: Any, func: Any, *__: Any) -> None:
        pytest.fail(f"{func} creates tensors with values")

    monkeypatch.setattr(fake_tensor, "run_fallback_kernel", fail)
    options = build_composed_run(f"optimizer={optimizer}", f"optimizer.fused={fused}").optimizer
    with fake_tensors() as mode:
        network = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
        update = options.build(network)
        for _ in range(2):
            network(torch.ones(5, 3)).sum().backward()
            update.step()
        state = [value for values in update.state.values() for value in values.values()]
        assert state
        assert all(getattr(each, "fake_mode", None) is mode for each in state)


class DropPaths(nn.Module):
    """Computes its rates with tensors, as timm's networks do."""

    def __init__(self):
        super().__init__()
        rates = [rate.item() for rate in torch.linspace(0, 0.1, 3)]
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Dropout(rate)) for rate in rates))
        self.tied, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4, dtype=torch.float64)
        self.tied.weight = self.layers[0][0].weight
        self.norm.bias.requires_grad_(False)
        self.register_buffer("absent", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers(x) + self.tied(x)
        return x if x.max() > 0 else -x


def described(model: nn.Module) -> dict[str, tuple]:
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    return {name: (tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad) for name, tensor in tensors}


def test_a_network_that_reads_values_while_it_is_built_is_built_with_fake_tensors():
    real = DropPaths()
    with fake_tensors() as mode:
        fake = build_with_values(DropPaths)
        assert described(fake) == described(real)
        assert all(tensor.fake_mode is mode for tensor in [*fake.parameters(), *fake.buffers()])
        assert fake.tied.weight is fake.layers[0][0].weight
        assert isinstance(fake.tied.weight, nn.Parameter)
        assert [layer[1].p for layer in fake.layers] == [layer[1].p for layer in real.layers]


def test_reading_a_value_in_forward_is_refused_by_the_place_in_the_code():
    with fake_tensors():
        model = build_with_values(DropPaths)
        with pytest.raises(Exception) as reads:
            model(torch.zeros(2, 4))
    key, _, why, _ = refusal(reads.value)
    assert key == "model"
    assert f"{__file__}:" in why
