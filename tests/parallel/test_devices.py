"""Tests of the choice of devices for a process that uses several GPUs."""

from __future__ import annotations

import pytest
import torch

from runner.config.errors import ConfigError
from runner.device import Device
from runner.parallel.base import devices_of_one_process

CPU = torch.device("cpu")


@pytest.fixture
def _two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.mark.usefixtures("_two_gpus")
@pytest.mark.parametrize(("indices", "found"), [([], [0, 1]), ([1], [1]), ([1, 0], [1, 0])])
@pytest.mark.parametrize("kind", ["auto", "cuda"])
def test_all_gpus_or_those_in_indices_are_used_in_the_given_order(
    kind: str, indices: list[int], found: list[int]
) -> None:
    devices = devices_of_one_process(Device(kind=kind, indices=indices))
    assert devices == [torch.device("cuda", index) for index in found]


@pytest.mark.usefixtures("_two_gpus")
def test_a_gpu_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError) as refusal:
        devices_of_one_process(Device(kind="cuda", indices=[0, 2]))
    assert (refusal.value.key, refusal.value.got) == ("device.indices", [0, 2])


def test_without_a_gpu_there_is_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert devices_of_one_process(Device(kind="cpu")) == [CPU]


@pytest.mark.parametrize("hidden", ["", "-1", "-1,0"])
def test_hidden_gpus_are_refused_unless_the_cpu_is_asked_for(hidden: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    with pytest.raises(ConfigError) as refusal:
        devices_of_one_process(Device())
    assert (refusal.value.key, refusal.value.got) == ("device.kind", "auto")
    assert devices_of_one_process(Device(kind="cpu")) == [CPU]
