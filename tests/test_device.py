"""Tests of the choice of a device on simulated machines, and of torch's global settings."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from unittest import mock

import pytest
import torch
from helpers.fake_cuda import simulate_accelerators

import runner.device
from runner.config.errors import ConfigError
from runner.device import Device, default_threads, oversubscription


@pytest.fixture
def machine(monkeypatch):
    """Return a function that simulates a machine with `num_cuda` CUDA devices and, if `mps` is True, a Metal device."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def set_up(num_cuda: int = 0, mps: bool = False) -> None:
        simulate_accelerators(monkeypatch, num_cuda or int(mps), "cuda" if num_cuda or not mps else "mps")

    return set_up


def refusal(device: Device) -> ConfigError:
    with pytest.raises(ConfigError) as refused:
        device.resolve_all()[0]
    return refused.value


@pytest.mark.parametrize(
    ("num_cuda", "mps", "expected"),
    [(0, False, "cpu"), (0, True, "mps:0"), (1, False, "cuda:0"), (3, False, "cuda:0")],
)
def test_auto_takes_the_accelerator_of_torch_or_the_cpu(machine, num_cuda, mps, expected):
    machine(num_cuda, mps)
    assert Device().resolve_all()[0] == torch.device(expected)


def test_an_absent_device_is_refused_by_key(machine, monkeypatch):
    machine(0)
    assert refusal(Device(kind="cuda")).key == "kind"
    refused = refusal(Device(kind="mps"))
    assert (refused.key, refused.got) == ("kind", "mps")
    refused = refusal(Device(kind="auto", index=0))
    assert (refused.key, refused.got) == ("index", 0)
    assert "cpu" in refused.why
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert "CUDA_VISIBLE_DEVICES='7'" in refusal(Device(kind="cuda")).why
    machine(2)
    refused = refusal(Device(kind="cuda", index=2))
    assert (refused.key, refused.got) == ("index", 2)
    assert re.findall(r"\d", refused.remedy) == ["0", "1"], "from 0 to 1"
    assert "2" in refused.why
    assert "CUDA_VISIBLE_DEVICES='7'" in refused.why


def test_the_first_of_the_named_devices_is_used_by_a_mode_with_one(machine):
    machine(4)
    assert Device(indices=[2]).resolve_all()[0] == torch.device("cuda:2")
    assert Device(kind="cuda", indices=[3, 1]).resolve_all()[0] == torch.device("cuda:3")
    assert Device(indices=[3, 1]).resolve_all() == [torch.device("cuda:3"), torch.device("cuda:1")]
    assert refusal(Device(indices=[4])).key == "indices"


def test_synchronize_waits_for_the_device_it_is_given(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    for name in ("cpu", "cuda:1", "mps:0"):
        runner.device.synchronize(torch.device(name))
    assert waited == [torch.device("cuda:1"), torch.device("mps:0")]


def switches() -> tuple:
    return torch.get_num_threads(), torch.backends.cudnn.benchmark, torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("deterministic", [False, True])
def test_settings_apply_during_the_run_and_are_restored(deterministic, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    taken = []

    @contextmanager
    def current(index: int) -> Iterator[None]:  # which also restores the current device, without a context
        taken.append(index)
        yield

    monkeypatch.setattr(torch.accelerator, "device_index", current)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)  # the first use
    before = switches()
    with Device(threads=2).settings(torch.device("cuda:1"), deterministic):
        assert switches() == (2, not deterministic, deterministic)
    assert switches() == before
    assert taken == [1]
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"  # the user's value is kept

    def fail() -> None:
        with Device().settings(torch.device("cpu"), deterministic):
            assert switches() == (before[0], False, deterministic)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert switches() == before


@pytest.mark.parametrize("message", ["CUDA error: all CUDA-capable devices are busy or unavailable", "out of memory"])
def test_a_device_that_another_process_has_is_refused(message, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "device_index", lambda index: nullcontext())
    monkeypatch.setattr(torch, "zeros", mock.Mock(side_effect=RuntimeError(f"{message}\nsee there")))
    before = switches()
    with (
        pytest.raises(ConfigError, match=f"its first use failed: {message}\n") as refused,
        Device().settings(torch.device("cuda:1"), deterministic=True),
    ):
        pass
    assert (refused.value.key, refused.value.got) == ("device.kind", "cuda:1")
    assert switches() == before


def test_an_accelerator_of_another_type_is_refused_in_words(machine):
    machine(1)
    assert "cuda" in refusal(Device(kind="xpu")).why
    machine(0)
    assert "built for cuda only" in refusal(Device(kind="xpu")).why
    with pytest.raises(ConfigError, match="torch has no devices of this type"):
        Device(kind="graphics")


@pytest.mark.parametrize(
    ("cores", "processes", "workers", "threads"),
    [(2, 1, 0, 8), (2, 1, 1, 1), (2, 1, 2, 1), (8, 1, 2, 6), (8, 1, 7, 4), (8, 2, 1, 3), (1, 1, 1, 1)],
)
def test_by_default_data_workers_have_their_own_cores(cores, processes, workers, threads, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert default_threads(torch.device("cpu"), workers) == threads
    assert default_threads(torch.device("cuda"), workers) == 8
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    assert default_threads(torch.device("cpu"), workers) == 8


@pytest.mark.cases(
    ("cpu", 1, 2, 0, ""),
    ("cpu", 1, 1, 1, ""),
    ("cuda", 1, 2, 1, ""),  # with a GPU, only one thread per process counts
    ("cpu", 1, 2, 1, "3 threads"),
    ("cpu", 3, 1, 1, "6 threads"),
)
def test_more_threads_than_cores_are_reported(device, processes, threads, workers, expected, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    with monkeypatch.context() as patched:
        patched.setattr(torch, "get_num_threads", lambda: threads)
        assert oversubscription(torch.device(device), workers).partition(" compete for 2 cores")[0] == expected
