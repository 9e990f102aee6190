"""Tests of `runner doctor` on simulated machines: torch.cuda and NVML are fakes with distinct numbers."""

import io
import json
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch
from helpers.fake_cuda import simulate_accelerators
from rich.console import Console

from runner.commands import doctor
from runner.commands.doctor import render
from runner.config.options import option_files
from runner.system import accelerator, provenance

GIB = 2**30
FIELDS = ("name", "major", "minor", "total_memory", "multi_processor_count", "uuid")
CARDS = [
    SimpleNamespace(**dict(zip(FIELDS, values, strict=True)))
    for values in (("Alpha 9000", 9, 0, 80 * GIB, 132, "a-0"), ("Beta 75", 7, 5, 16 * GIB, 40, "b-1"))
]
FREE = [77 * GIB, 3 * GIB]
CLOCKS = {"GPU-a-0": ((1200, 1980), (2600, 2619)), "GPU-b-1": ((3, 4), (3, 4))}
"""The clock rate and the highest one, of the processor and of the memory, by UUID."""


@pytest.fixture
def two_cards(monkeypatch) -> None:
    """Two different CUDA devices: the second is the current one, and only the first has peer access to the other."""
    simulate_accelerators(monkeypatch, 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: CARDS[torch.device(device).index])
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda here, there: (here.index, there) == (0, 1))
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device: (FREE[device.index], 0))
    monkeypatch.setattr(doctor, "computes", lambda device: True)
    computing(monkeypatch, has_tf32=True, has_float64=True, scales_float16=True)


def computing(monkeypatch: pytest.MonkeyPatch, **answers: bool) -> None:
    """Let the functions of these names say of accelerators what they compute, and no of the CPU."""
    for name, answer in answers.items():
        monkeypatch.setattr(accelerator, name, lambda device, answer=answer: answer and device.type != "cpu")


@pytest.fixture
def nvml(monkeypatch) -> None:
    """A fake NVML that finds devices by their UUIDs, which are those of CUDA, unlike the indices."""
    fake = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlSystemGetDriverVersion=lambda: "580.1",
        nvmlDeviceGetHandleByUUID=lambda uuid: CLOCKS[uuid],
        nvmlDeviceGetClockInfo=lambda handle, kind: handle[kind][0],
        nvmlDeviceGetMaxClockInfo=lambda handle, kind: handle[kind][1],
        NVML_CLOCK_SM=0,
        NVML_CLOCK_MEM=1,
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake)


def rendered_report(report: dict) -> str:
    console = Console(width=200, file=io.StringIO())
    console.print(render(report))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def row_of(text: str, start: str) -> str:
    return next(line for line in text.splitlines() if line.strip().startswith(start))


@pytest.mark.usefixtures("two_cards", "nvml")
def test_each_of_two_devices_is_reported_with_its_own_values():
    report = json.loads(json.dumps(doctor.gather()))
    first, second = report["devices"]
    assert first == {
        "device": "cuda:0",
        "name": "Alpha 9000",
        "total_bytes": 80 * GIB,
        "capability": "9.0",
        "multiprocessors": 132,
        "uuid": "a-0",
        "free_bytes": 77 * GIB,
        "current": False,
        "peers": ["cuda:1"],
        "computes": True,
        "clock_mhz": 1200,
        "max_clock_mhz": 1980,
        "memory_clock_mhz": 2600,
        "max_memory_clock_mhz": 2619,
    }
    assert (second["name"], second["free_bytes"], second["current"], second["peers"]) == ("Beta 75", 3 * GIB, True, [])
    assert report["driver"] == "580.1"

    text = rendered_report(report)
    first, second = row_of(text, "cuda:0"), row_of(text, "cuda:1 (current)")
    for shown in ("Alpha 9000", "82.7 GB of 85.9 GB", "9.0", "132", "1200 of 1980 MHz", "2600 of 2619 MHz", "cuda:1"):
        assert shown in first
    for shown in ("Beta 75", "3.2 GB of 17.2 GB", "7.5", "40", "3 of 4 MHz", "none"):
        assert shown in second
    assert "device=auto chooses cuda:0" in text
    assert "parallel= on 2 accelerators" in text

    table = {row["precision"]: row["cuda"] for row in report["precisions"]}
    assert table.keys() == option_files()["precision"].keys()
    assert table["16"] == "float16 autocast with loss scaling"
    modes = {mode["name"]: mode["what"] for mode in report["parallel"]}
    assert modes.keys() == option_files()["parallel"].keys()
    assert modes["hogwild"][:40] in row_of(text, "hogwild")


@pytest.mark.usefixtures("two_cards", "nvml")
def test_clocks_need_nvml(monkeypatch):
    def fails() -> None:
        raise OSError("NVML Shared Library Not Found")

    monkeypatch.setattr(sys.modules["pynvml"], "nvmlInit", fails)
    assert "NVML: OSError: NVML Shared Library Not Found" in doctor.gather()["findings"]
    monkeypatch.setitem(sys.modules, "pynvml", None)  # import pynvml raises ImportError
    report = doctor.gather()
    assert (report["driver"], "clock_mhz" in report["devices"][0]) == (None, False)
    assert any("pip install nvidia-ml-py" in finding for finding in report["findings"])
    assert "MHz" not in row_of(rendered_report(report), "cuda:0")


def test_a_machine_without_cuda_is_reported(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "pynvml", None)  # import pynvml raises ImportError
    simulate_accelerators(monkeypatch, 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    doctor.main(["--json"])
    report = json.loads(capsys.readouterr().out)
    assert (report["versions"]["torch"], report["source"]) == (torch.__version__, provenance.source())
    assert report["devices"] == []
    assert "CUDA_VISIBLE_DEVICES='' leaves no CUDA device visible" in report["findings"]
    assert list(report["precisions"][0]) == ["precision", "cpu"]
    assert "device=auto chooses the CPU" in rendered_report(report)

    simulate_accelerators(monkeypatch, 1, "mps")
    computing(monkeypatch, has_float64=False, scales_float16=True)
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 12 * GIB)
    assert "12.9 GB" in row_of(rendered_report(doctor.gather()), "mps")


def test_a_driver_that_warns_or_raises_is_a_finding(monkeypatch):
    def broken() -> bool:
        warnings.warn("CUDA initialization: driver too old\nsee there", stacklevel=1)
        raise RuntimeError("CUDA unknown error")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: broken())
    report = doctor.gather()
    assert report["devices"] == []
    assert "devices: RuntimeError: CUDA unknown error" in report["findings"]
    assert "devices: CUDA initialization: driver too old" in report["findings"]
    assert "CUDA unknown error" in rendered_report(report)


@pytest.mark.usefixtures("two_cards", "nvml")
def test_a_device_that_cannot_compute_is_reported_as_a_finding(monkeypatch):
    def computes(device: str) -> bool:
        if device == "cuda:1":
            raise RuntimeError("no kernel image is available for execution on the device")
        return True

    monkeypatch.setattr(doctor, "computes", computes)
    report = doctor.gather()
    assert [device["computes"] for device in report["devices"]] == [True, False]
    expected = "cuda:1: RuntimeError: no kernel image is available for execution on the device"
    assert [finding for finding in report["findings"] if finding.startswith("cuda")] == [expected]


@pytest.mark.parametrize("kind", ["cpu", "cuda", "mps"])
@pytest.mark.parametrize("modern", [True, False])
def test_the_meaning_of_a_precision_depends_on_what_the_device_computes(kind, modern, monkeypatch):
    has_float64 = modern and kind != "mps"
    computing(monkeypatch, has_tf32=modern and kind == "cuda", has_float64=has_float64, scales_float16=modern)
    found = doctor.meanings_on(torch.device(kind), ["avx2", *["amx_bf16"] * modern])
    assert ("in TF32" in found["tf32"]) == (modern and kind == "cuda")
    assert found["64"].startswith("float64" if has_float64 or kind == "cpu" else "not available")
    assert ("emulated" in found["bf16"]) == (not modern and kind != "mps")
    assert found["16"].startswith("float16" if modern and kind != "cpu" else "the same as bf16")
