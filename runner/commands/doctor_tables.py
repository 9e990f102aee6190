"""Functions that render the report of `runner doctor` as tables for a terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from runner.system.tables import pairs, table


def render(report: dict[str, Any]) -> Group:
    """Render `report`, the result of `runner.commands.doctor.gather`, as tables."""
    names = [precision for precision in report["precisions"][0] if precision != "precision"]
    precisions = ([p["precision"], *(p[name] for name in names)] for p in report["precisions"])
    count = sum("uuid" in device for device in report["devices"])
    where = f"{count} CUDA device{'s' * (count != 1)}" if count else f"the CPU: {report['cpu']['allowed_cores']} cores"
    versions, source = report["versions"] | {"driver": report["driver"]}, report["source"]
    if source is not None:
        commit = "–" if source["commit"] is None else source["commit"]
        versions["commit"] = f"{commit}{', with uncommitted changes' if source['dirty'] else ''}"
    findings = [Text("\nfindings", style="bold yellow"), *(Text(f"  {each}") for each in report["findings"])]
    return Group(
        _devices(report["devices"]),
        pairs("processor", _processor(report)),
        table("precision=", ["", *names], precisions),
        table(f"parallel= on {where}", ["", ""], ([option["name"], option["what"]] for option in report["parallel"])),
        Text("  which is the fastest: python -m runner tune OVERRIDE …"),
        pairs("backends", {name: _word(value) for name, value in report["backends"].items()}),
        pairs("versions", versions),
        pairs("variables", report["variables"]),
        *(findings if report["findings"] else [Text("\nno problems found", style="green")]),
    )


def _devices(devices: list[dict[str, Any]]) -> RenderableType:
    if not devices:
        return Text("no accelerator: device=auto chooses the CPU")
    titles = ["", "name", "memory free", "compute", "SMs", "clock", "memory clock", "peers", "computes"]
    rows = (
        [
            device["device"] + (" (current)" if device.get("current") else ""),
            device["name"],
            f"{_size(device.get('free_bytes'))} of {_size(device['total_bytes'])}",
            device["capability"],
            device.get("multiprocessors"),
            _clock(device.get("clock_mhz"), device.get("max_clock_mhz")),
            _clock(device.get("memory_clock_mhz"), device.get("max_memory_clock_mhz")),
            " ".join(device.get("peers", [])) or "none",
            _word(device.get("computes")),
        ]
        for device in devices
    )
    return table(f"devices: device=auto chooses {devices[0]['device']}", titles, rows)


def _processor(report: dict[str, Any]) -> dict[str, Any]:
    cpu, memory = report["cpu"], report["memory"]
    limit = f"; this process may use {_size(memory['limit_bytes'])}" if memory["limit_bytes"] else ""
    quota = f", with a quota of {cpu['quota_cores']:g} cores" if cpu["quota_cores"] else ""
    return {
        "model": cpu["model"],
        "cores": f"{cpu['physical_cores'] or '–'} physical, {cpu['logical_cores'] or '–'} logical",
        "this process": f"may use {cpu['allowed_cores']}{quota}; torch uses {cpu['threads']} threads",
        "instructions": f"{cpu['capability']} ({' '.join(cpu['features']) or 'no special instruction sets'})",
        "memory": f"{_size(memory['available_bytes'])} free of {_size(memory['total_bytes'])}{limit}",
    }


def _size(num_bytes: int | None) -> str:
    return "–" if num_bytes is None else f"{num_bytes / 2**30:.1f} GiB"


def _clock(now: int | None, most: int | None) -> str:
    if now is None:
        return "–" if most is None else f"up to {most} MHz"
    return f"{now} MHz" if most is None else f"{now} of {most} MHz"


def _word(value: object) -> object:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else value
