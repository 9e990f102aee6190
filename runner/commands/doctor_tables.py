"""Functions that render the report of `runner doctor` as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text


def render(report: dict[str, Any]) -> Group:
    """Render `report`, the result of `runner.commands.doctor.gather`, as tables."""
    names = [precision for precision in report["precisions"][0] if precision != "precision"]
    parts: list[RenderableType] = [
        _devices(report["devices"]),
        _pairs("processor", _processor(report)),
        _table(
            "precision=", ["", *names], ([p["precision"], *(p[name] for name in names)] for p in report["precisions"])
        ),
        _table(f"parallel= on {_where(report)}", ["", ""], ([o["name"], o["what"]] for o in report["parallel"])),
        Text("  which is the fastest: python -m runner tune OVERRIDE …"),
        _pairs("backends", {name: _word(value) for name, value in report["backends"].items()}),
        _pairs("versions", report["versions"] | {"driver": report["driver"]} | _commit(report["source"])),
        _pairs("variables", report["variables"]),
        _findings(report["findings"]),
    ]
    return Group(*parts)


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
    return _table(f"devices: device=auto chooses {devices[0]['device']}", titles, rows)


def _processor(report: dict[str, Any]) -> dict[str, Any]:
    cpu, memory = report["cpu"], report["memory"]
    limit = f"; this process may use {_size(memory['limit_bytes'])}" if memory["limit_bytes"] else ""
    quota = f", with a quota of {cpu['quota_cores']:g} cores" if cpu["quota_cores"] else ""
    return {
        "model": cpu["model"],
        "cores": f"{_or_dash(cpu['physical_cores'])} physical, {_or_dash(cpu['logical_cores'])} logical",
        "this process": f"may use {cpu['allowed_cores']}{quota}; torch uses {cpu['threads']} threads",
        "instructions": f"{cpu['capability']} ({' '.join(cpu['features']) or 'no special instruction sets'})",
        "memory": f"{_size(memory['available_bytes'])} free of {_size(memory['total_bytes'])}{limit}",
    }


def _where(report: dict[str, Any]) -> str:
    """Return a description of the devices that a parallel mode can use."""
    count = sum("uuid" in device for device in report["devices"])
    return f"{count} CUDA device{'s' * (count != 1)}" if count else f"the CPU: {report['cpu']['allowed_cores']} cores"


def _commit(source: dict[str, Any] | None) -> dict[str, str]:
    if source is None:
        return {}
    return {"commit": f"{_or_dash(source['commit'])}{', with uncommitted changes' if source['dirty'] else ''}"}


def _findings(findings: list[str]) -> RenderableType:
    if not findings:
        return Text("\nno problems found", style="green")
    return Group(Text("\nfindings", style="bold yellow"), *(Text(f"  {finding}") for finding in findings))


def _pairs(title: str, values: dict[str, Any]) -> Table:
    return _table(title, ["", ""], values.items())


def _table(title: str, columns: list[str], rows: Iterable[Iterable[Any]]) -> Table:
    box = SIMPLE_HEAD if any(columns) else None
    table = Table(title=f"\n{title}", title_justify="left", title_style="bold", box=box, show_header=any(columns))
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(_or_dash(value)) for value in row))  # Text, so that brackets are not parsed as markup
    return table


def _size(num_bytes: int | None) -> str:
    return "–" if num_bytes is None else f"{num_bytes / 2**30:.1f} GiB"


def _clock(now: int | None, most: int | None) -> str:
    if now is None:
        return "–" if most is None else f"up to {most} MHz"
    return f"{now} MHz" if most is None else f"{now} of {most} MHz"


def _word(value: object) -> object:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else value


def _or_dash(value: object) -> str:
    return "–" if value is None else str(value)
