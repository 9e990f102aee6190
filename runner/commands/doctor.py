"""`python -m runner doctor [--json]` describes this machine, and what it can do.

Which parallel mode is the fastest here depends on the config: `python -m runner tune` measures it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from rich.console import Group, RenderableType
from rich.text import Text

from runner.analysis.output import print_report
from runner.commands.arguments import Parser, command
from runner.config.options import description, option_files
from runner.system import accelerator
from runner.system.console import DONE
from runner.system.provenance import collect_findings, environment
from runner.system.tables import pairs, size, table


@command
def main(arguments: Sequence[str] | None) -> int:
    parser = Parser("doctor", __doc__)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    options = parser.parsed(arguments)
    print_report(gather(), options.json, render)
    return DONE


def gather() -> dict[str, Any]:
    """Return a report on this machine as plain values: `runner.system.provenance.environment` and more details."""
    report = environment()
    devices, findings = report["devices"], report["findings"]
    for device in devices:
        _add_details(device, len(devices), findings)
    on_cuda = [device for device in devices if device["device"].startswith("cuda")]
    report["driver"] = _add_clocks(on_cuda, findings)
    distributed, cudnn = torch.distributed.is_available(), None
    with collect_findings(findings, "cuDNN"):
        cudnn = torch.backends.cudnn.version()
    report["backends"] = {
        "cuda": bool(on_cuda),
        "cudnn": cudnn,
        "mps": torch.backends.mps.is_available(),
        "mkldnn": torch.backends.mkldnn.is_available(),
        "openmp": torch.backends.openmp.is_available(),
        "nccl": distributed and torch.distributed.is_nccl_available(),
        "gloo": distributed and torch.distributed.is_gloo_available(),
    }
    found = [torch.device("cpu"), *(torch.device(device["device"]) for device in devices[:1])]  # which auto chooses
    meanings = {device.type: meanings_on(device, report["cpu"]["features"]) for device in found}
    report["precisions"] = [
        {"precision": name} | {kind: of[name] for kind, of in meanings.items()} for name in meanings["cpu"]
    ]
    modes = option_files()["parallel"].items()
    report["parallel"] = [{"name": name, "what": description(path)} for name, path in modes]

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not devices and visible is not None:
        findings.append(f"CUDA_VISIBLE_DEVICES={visible!r} leaves no CUDA device visible")
    if report["driver"] is None and on_cuda:
        findings.append("to see the clocks: pip install nvidia-ml-py")
    return report


def _add_details(device: dict[str, Any], count: int, findings: list[str]) -> None:
    """Add further properties of one of `count` devices, some of which need a context on it."""
    name, here = device["device"], torch.device(device["device"])
    device |= {"uuid": str(getattr(accelerator.properties(here), "uuid", "")), "free_bytes": None, "computes": False}
    device |= {"current": False, "peers": []}
    with collect_findings(findings, name):
        device["current"] = torch.accelerator.current_device_index() == here.index
        device["peers"] = [f"cuda:{other}" for other in accelerator.peers(here, count)]
        device["free_bytes"] = torch.accelerator.get_memory_info(here)[0]
        device["computes"] = computes(name)
        if not device["computes"]:
            findings.append(f"{name}: a sum of ones is wrong")


def computes(device: str) -> bool:
    """Return whether `device` computes a sum correctly: one that torch lists may be broken, or too old for torch."""
    return torch.ones(1000, device=device).sum().item() == 1000


def _add_clocks(on_cuda: list[dict[str, Any]], findings: list[str]) -> str | None:
    """Add clock rates in MHz to the CUDA devices, and return the version of the driver; None for what NVML cannot tell.

    NVML is the optional package nvidia-ml-py.
    """
    driver = None
    try:
        import pynvml  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    with collect_findings(findings if on_cuda else [], "NVML"):  # without a CUDA device, NVML's error is expected
        pynvml.nvmlInit()
        driver = pynvml.nvmlSystemGetDriverVersion()
        for device in on_cuda:  # by UUID, because CUDA_VISIBLE_DEVICES changes torch's indices but not NVML's
            handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{device['uuid']}")
            for name, kind in (("clock", pynvml.NVML_CLOCK_SM), ("memory_clock", pynvml.NVML_CLOCK_MEM)):
                device[f"{name}_mhz"] = pynvml.nvmlDeviceGetClockInfo(handle, kind)
                device[f"max_{name}_mhz"] = pynvml.nvmlDeviceGetMaxClockInfo(handle, kind)
    return driver


def meanings_on(device: torch.device, features: Iterable[str]) -> dict[str, str]:
    """Return what each option of `precision=` does on `device`; `features` are the instruction sets of the CPU."""
    tf32, on_cpu = accelerator.has_tf32(device), device.type == "cpu"
    native = bool({"avx512_bf16", "amx_bf16", "bf16"} & set(features)) if on_cpu else tf32 or device.type != "cuda"
    brain = "bfloat16 autocast" + ("" if native else ", emulated: it may be slower than 32")
    double = on_cpu or accelerator.has_float64(device)
    scales = accelerator.scales_float16(device)
    return {
        "32": "float32 throughout, without TF32",
        "tf32": "float32, matrix products in TF32" if tf32 else "the same as 32: no TF32 units",
        "64": "float64 throughout, to check gradients" if double else "not available: it has no float64",
        "bf16": brain,
        "16": "float16 autocast with loss scaling" if scales else f"the same as bf16: {brain}",
    }


# ---------------------------------------------------------------------------------------------------------------------
# Tables


def render(report: dict[str, Any]) -> Group:
    """Render the report that `gather` returns as tables."""
    names = [precision for precision in report["precisions"][0] if precision != "precision"]
    precisions = ([p["precision"], *(p[name] for name in names)] for p in report["precisions"])
    count = len(report["devices"])
    where = f"{count} accelerator{'s' * (count != 1)}" if count else f"the CPU: {report['cpu']['allowed_cores']} cores"
    versions, source = report["versions"] | {"driver": report["driver"]}, report["source"]
    if source is not None:
        versions["commit"] = (source["commit"] or "–") + ", with uncommitted changes" * source["dirty"]
    findings = [Text("\nfindings", style="bold yellow"), *(Text(f"  {each}") for each in report["findings"])]
    return Group(
        _device_table(report["devices"]),
        pairs("processor", _processor(report)),
        table("precision=", ["", *names], precisions),
        table(f"parallel= on {where}", ["", ""], ([option["name"], option["what"]] for option in report["parallel"])),
        Text("  which is the fastest: python -m runner tune OVERRIDE …"),
        pairs("backends", {name: _word(value) for name, value in report["backends"].items()}),
        pairs("versions", versions),
        pairs("variables", report["variables"]),
        *(findings if report["findings"] else [Text("\nno problems found", style="green")]),
    )


def _device_table(devices: list[dict[str, Any]]) -> RenderableType:
    if not devices:
        return Text("no accelerator: device=auto chooses the CPU")
    titles = ["", "name", "memory free", "compute", "SMs", "clock", "memory clock", "peers", "computes"]
    rows = (
        [
            device["device"] + (" (current)" if device.get("current") else ""),
            device["name"],
            " of ".join(size(device[key]) for key in ("free_bytes", "total_bytes") if device[key] is not None),
            device["capability"],
            device.get("multiprocessors"),
            _clock(device, "clock"),
            _clock(device, "memory_clock"),
            " ".join(device.get("peers", [])) or "none",
            _word(device.get("computes")),
        ]
        for device in devices
    )
    return table(f"devices: device=auto chooses {devices[0]['device']}", titles, rows)


def _processor(report: dict[str, Any]) -> dict[str, Any]:
    cpu, memory = report["cpu"], report["memory"]
    limit = f"; this process may use {size(memory['limit_bytes'])}" if memory["limit_bytes"] else ""
    quota = f", with a quota of {cpu['quota_cores']:g} cores" if cpu["quota_cores"] else ""
    return {
        "model": cpu["model"],
        "cores": f"{cpu['physical_cores'] or '–'} physical, {cpu['logical_cores'] or '–'} logical",
        "this process": f"may use {cpu['allowed_cores']}{quota}; torch uses {cpu['threads']} threads",
        "instructions": f"{cpu['capability']} ({' '.join(cpu['features']) or 'no special instruction sets'})",
        "memory": f"{size(memory['available_bytes'])} free of {size(memory['total_bytes'])}{limit}",
    }


def _clock(device: dict[str, Any], name: str) -> str:
    now, most = (device.get(f"{start}{name}_mhz") for start in ("", "max_"))
    return "–" if now is None else f"{now} of {most} MHz"


def _word(value: object) -> object:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else value
