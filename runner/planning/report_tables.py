"""Functions that render a plan as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group
from rich.text import Text

from runner.parallel.pipelining.schedules import SCHEDULES
from runner.planning.formatting import flops, milliseconds, significant, size
from runner.planning.step_tracker import KINDS
from runner.system.tables import table

_MOST_RANKS = 8
"""If there are more ranks than this, and all do the same work, they share a row."""

Table = tuple[str, list[str], list[list[str]]]
"""The title, the column titles and the rows of a table."""


def render(report: dict[str, Any]) -> Group:
    """Render `report`, the result of `runner.planning.report.report_of`, as tables."""
    parts = [
        table(title, titles, rows, right_from=1 if any(titles) else None) for title, titles, rows in tables(report)
    ]
    notes = [Text(f"note: {note}", style="dim") for note in report["notes"]]
    if report["fits"] is None:
        return Group(*parts, *notes)
    peak = max(rank["peak_bytes"] for rank in report["ranks"])
    verdict = f"it {'fits' if report['fits'] else 'does not fit'}: {size(peak)} of {size(report['memory_bytes'])}"
    return Group(*parts, *notes, Text(verdict))


def tables(report: dict[str, Any]) -> list[Table]:
    """Return the tables that `render` shows for `report`."""
    found: list[Table] = [
        ("run", ["", ""], [[key, text] for key, text in _overview(report).items()]),
        ("work", ["rank", "layers", "samples of a batch", "forward", "backward", "sent"], _work(report["ranks"])),
        (
            "memory of tensors at the peak of a step",
            ["rank", *KINDS, "sum", "before the first step", "between steps"],
            _memory(report["ranks"]),
        ),
    ]
    if report["pipeline"]:
        found.append(_bubbles(report["pipeline"]))
    if report["measured"]:
        found.append(("predicted and measured", ["", "predicted", "measured"], _comparison(report)))
    if report["remedies"]:
        fits = {True: "yes", False: "no"}
        rows = [
            [" ".join(each["overrides"]), size(each["peak_bytes"]), fits[each["fits"]], each["costs"], each["results"]]
            for each in report["remedies"]
        ]
        title = "changes that need less memory, the cheapest first"
        found.append((title, ["add", "peak", "fits", "costs", "results"], rows))
    return found


def _overview(report: dict[str, Any]) -> dict[str, str]:
    batch, length, checkpoint, host = (report[key] for key in ("batch", "length", "checkpoint", "host"))
    names = {"data_shards": "processes", "accumulation": "accumulated", "pipeline_micro_batches": "micro-batches"}
    factors = [f"{batch[key]} {name}" for key, name in names.items() if batch[key] > 1]
    product = f" = {' × '.join([*factors, str(batch['samples_per_pass'])])}" if factors else ""
    count, epoch = length["epochs"], length["steps_per_epoch"]
    epochs = f", {significant(count, 3)} epochs of {significant(epoch)} steps" if count else ""
    lines = report["run"] | {
        "batch": f"{batch['batch_size']} samples{product}",
        "length": f"{length['steps']:,} steps, {length['samples']:,} samples{epochs}",
        "checkpoint": f"{size(checkpoint['bytes'])}; at most {size(checkpoint['disk_bytes'])} on the disk",
    }
    if host:
        of = "available" if host["memory_of"] == "host" else f"on {host['memory_of']}"
        lines["this machine"] = f"{size(host['tensor_bytes'])} for tensors, {size(host['available_bytes'])} {of}"
    return lines


def _work(ranks: Sequence[dict[str, Any]]) -> list[list[str]]:
    rows = []
    for rank in ranks:
        (first, stop), blocks = rank["samples"], rank["blocks"]
        layers = "all" if not blocks else blocks[0] if len(blocks) == 1 else f"{blocks[0]} … {blocks[-1]}"
        messages = ", ".join(f"{each['calls']} {name}" for name, each in rank["messages"].items())
        sent = f"{size(rank['sent_bytes'])} ({messages})" if messages else "nothing"
        computed = flops(rank["forward_flops"]), flops(rank["backward_flops"])
        rows.append([str(rank["rank"]), layers, f"{first} – {stop - 1}", *computed, sent])
    if len(rows) <= _MOST_RANKS or any((row[1], row[3:]) != (rows[0][1], rows[0][3:]) for row in rows):
        return rows
    first, stop = ranks[0]["samples"]
    return [[f"0 – {len(rows) - 1}", rows[0][1], f"{stop - first} each", *rows[0][3:]]]


def _memory(ranks: Sequence[dict[str, Any]]) -> list[list[str]]:
    rows = []
    for rank in ranks:
        totals = sum(rank["peak"].values()), rank["placed_bytes"], sum(rank["kept"].values())
        rows.append([str(rank["rank"]), *(size(rank["peak"][kind]) for kind in KINDS), *map(size, totals)])
    if len(rows) > 1 and all(row[1:] == rows[0][1:] for row in rows):
        return [[f"0 – {len(rows) - 1}, each", *rows[0][1:]]]
    return rows


def _bubbles(pipeline: dict[str, Any]) -> Table:
    schedules = [key for key in pipeline["bubbles"][0] if key in SCHEDULES]
    chosen = pipeline["schedule"], pipeline["num_micro_batches"]
    rows = []
    for row in pipeline["bubbles"]:
        count = row["num_micro_batches"]
        cells = [
            "–" if row[name] is None else f"{'this config: ' * ((name, count) == chosen)}{row[name]:.1%}"
            for name in schedules
        ]
        rows.append([str(row["split_size"]), str(count), *cells])
    return "bubble: idle share of the processes' time", ["split size", "num micro batches", *schedules], rows


def _comparison(report: dict[str, Any]) -> list[list[str]]:
    """Return a row for each property that a run has measured: its name, the predicted and the measured value."""
    ranks, measured = report["ranks"], report["measured"]
    seconds, saved = measured["seconds"], measured["checkpoint_bytes"]
    count = sum(rank["forward_flops"] + rank["backward_flops"] for rank in ranks)
    memory = f"{size(ranks[0]['peak_bytes'])} (the tensors of rank 0)"
    return [
        ["peak of the memory", memory, f"{size(measured['peak_bytes'])} ({measured['peak_of']})"],
        ["time of a step", "–", f"{milliseconds(seconds)} in the median"],
        ["throughput", "–", f"{significant(measured['samples_per_second'])} samples/s"],
        ["arithmetic of a step", flops(count), f"{flops(count / seconds)}/s"],
        ["size of a checkpoint", size(report["checkpoint"]["bytes"]), size(saved) if saved else "–"],
    ]
