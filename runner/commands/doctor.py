"""`python -m runner doctor [--json]` describes this machine, and what it can do.

Which parallel mode is the fastest here depends on the config: `python -m runner tune` measures it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from runner.commands.arguments import Parser
from runner.config.errors import ConfigError
from runner.config.options import description, option_files
from runner.system.cpu import usable_cores
from runner.system.exit_codes import DONE, REFUSED
from runner.system.gpu import lacks_kernels
from runner.system.provenance import collect_findings, environment

PRECISIONS = ("32", "tf32", "64", "bf16", "16")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a report on this machine as tables, or with `--json` as one JSON object; return the exit code."""
    parser = Parser("doctor", __doc__)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    try:
        options = parser.parsed(arguments)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return REFUSED
    report = gather()
    if options.json:
        print(json.dumps(report, indent=2))
    else:
        from rich.console import Console

        from runner.commands.doctor_tables import render

        Console(width=None if sys.stdout.isatty() else 130).print(render(report))
    return DONE


def gather() -> dict[str, Any]:
    """Return a report on this machine as plain values: `runner.system.provenance.environment` and more details.

    `driver` is the version of the driver, or None; `backends` says which are available, for cuDNN its version;
    `precisions` and `parallel` say what each option does here; `findings` also contains recommendations.
    """
    report = environment()
    devices, findings = report["devices"], report["findings"]
    for device in devices:
        if device["device"].startswith("cuda"):
            device |= _cuda_details(int(device["device"].partition(":")[2]), len(devices), findings)
    report["driver"] = _add_clocks(devices, findings)
    report["backends"] = _backends(devices, findings)
    report["precisions"] = _precisions(devices, report["cpu"]["features"])
    modes = option_files()["parallel"].items()
    report["parallel"] = [{"name": name, "what": description(path)} for name, path in modes]
    findings += _remarks(report)
    return report


def _cuda_details(index: int, count: int, findings: list[str]) -> dict[str, Any]:
    """Return further properties of CUDA device `index` of `count`, some of which need a CUDA context."""
    properties = torch.cuda.get_device_properties(index)
    # Some versions of torch have no clock rates.
    kilohertz = [getattr(properties, name, None) for name in ("clock_rate", "memory_clock_rate")]
    details: dict[str, Any] = {
        "uuid": str(properties.uuid),
        "free_bytes": None,
        "current": False,
        "peers": [],
        "computes": False,
        "max_clock_mhz": kilohertz[0] and kilohertz[0] // 1000,
        "max_memory_clock_mhz": kilohertz[1] and kilohertz[1] // 1000,
    }
    with collect_findings(findings, f"cuda:{index}"):
        if why := lacks_kernels(index):
            findings.append(f"cuda:{index}: {why}")
        details["current"] = torch.cuda.current_device() == index
        others = (other for other in range(count) if other != index)
        details["peers"] = [f"cuda:{other}" for other in others if torch.cuda.can_device_access_peer(index, other)]
        details["free_bytes"] = torch.cuda.mem_get_info(index)[0]
        details["computes"] = computes(f"cuda:{index}")
        if not details["computes"]:
            findings.append(f"cuda:{index}: a sum of ones is wrong")
    return details


def computes(device: str) -> bool:
    """Return whether `device` computes a sum correctly: one that torch lists may be broken, or too old for torch."""
    return torch.ones(1000, device=device).sum().item() == 1000


def _add_clocks(devices: list[dict[str, Any]], findings: list[str]) -> str | None:
    """Add the current clock rates to `devices`, and return the version of the driver; None for what cannot be read."""
    driver, cuda_devices = None, [device for device in devices if "uuid" in device]
    for device in cuda_devices:
        device |= {"clock_mhz": None, "memory_clock_mhz": None}
    try:
        import pynvml  # pyright: ignore[reportMissingImports] (optional)
    except ImportError:
        return None
    with collect_findings(findings if cuda_devices else [], "NVML"):  # without a CUDA device, NVML's error is expected
        pynvml.nvmlInit()
        driver = pynvml.nvmlSystemGetDriverVersion()
        for device in cuda_devices:  # by UUID, because CUDA_VISIBLE_DEVICES changes torch's indices but not NVML's
            handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{device['uuid']}")
            device["clock_mhz"] = pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)
            device["memory_clock_mhz"] = pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM)
    return driver


def _backends(devices: list[dict[str, Any]], findings: list[str]) -> dict[str, Any]:
    distributed = torch.distributed.is_available()
    cudnn = None
    with collect_findings(findings, "cuDNN"):
        cudnn = torch.backends.cudnn.version()
    return {
        "cuda": any("uuid" in device for device in devices),
        "cudnn": cudnn,
        "mps": torch.backends.mps.is_available(),
        "mkldnn": torch.backends.mkldnn.is_available(),
        "openmp": torch.backends.openmp.is_available(),
        "nccl": distributed and torch.distributed.is_nccl_available(),
        "gloo": distributed and torch.distributed.is_gloo_available(),
    }


def _precisions(devices: list[dict[str, Any]], features: list[str]) -> list[dict[str, str]]:
    """Return what each precision does on each kind of device: on CUDA, with the lowest compute capability."""
    kinds: dict[str, str | None] = {"cpu": None}
    for device in devices:
        kind, capability = device["device"].partition(":")[0], device["capability"]
        kinds[kind] = min(kinds.get(kind) or capability, capability, key=_as_numbers) if capability else None
    return [
        {"precision": name, **{kind: meaning(name, kind, capability, features) for kind, capability in kinds.items()}}
        for name in PRECISIONS
    ]


def meaning(precision: str, kind: str, capability: str | None, features: Iterable[str]) -> str:
    """Return what an option of `precision=` does on a kind of device (`cpu`, `cuda` or `mps`); see runner/precision.py.

    Args:
        precision: the option.
        kind: the kind of device.
        capability: the compute capability of a CUDA device, for example `8.0`; None for other devices.
        features: the instruction sets of the CPU.
    """
    ampere = kind == "cuda" and _as_numbers(capability or "0.0") >= (8, 0)
    native = ampere or kind == "mps" or (kind == "cpu" and {"avx512_bf16", "amx_bf16", "bf16"} & set(features))
    brain = "bfloat16 autocast" + ("" if native else ", emulated: it may be slower than 32")
    return {
        "32": "float32 throughout, without TF32",
        "tf32": "float32, matrix products in TF32" if ampere else "the same as 32: no TF32 units",
        "64": "not available: Metal has no float64" if kind == "mps" else "float64 throughout, to check gradients",
        "bf16": brain,
        "16": "float16 autocast with loss scaling" if kind == "cuda" else f"the same as bf16: {brain}",
    }[precision]


def _remarks(report: dict[str, Any]) -> list[str]:
    remarks, processor = [], report["cpu"]
    visible, cores = os.environ.get("CUDA_VISIBLE_DEVICES"), max(1, int(usable_cores(processor)))
    if not report["devices"] and visible is not None:
        remarks.append(f"CUDA_VISIBLE_DEVICES={visible!r} leaves no CUDA device visible")
    if processor["threads"] > cores:
        remarks.append(f"torch uses {processor['threads']} threads on {cores} usable cores: set device.threads={cores}")
    if report["driver"] is None and any("uuid" in device for device in report["devices"]):
        remarks.append("to see the current clocks: pip install nvidia-ml-py")
    return remarks


def _as_numbers(capability: str) -> tuple[int, ...]:
    return tuple(int(part) for part in capability.split("."))
