"""Functions that render a plan as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Any

from rich.console import Group
from rich.text import Text

from runner.parallel.pipelining.schedules import SCHEDULES
from runner.planning.step_tracker import KINDS
from runner.system.tables import flops, milliseconds, significant, size, table

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
    work = ["rank", "layers", "samples of a batch", "forward", "backward", "sent"]
    memory = ["rank", *KINDS, "sum", "before the first step", "between steps"]
    found: list[Table] = [
        ("run", ["", ""], [[key, text] for key, text in _overview(report).items()]),
        ("work", work, _merged(map(_work, report["ranks"]))),
        ("memory of tensors at the peak of a step", memory, _merged(map(_memory, report["ranks"]))),
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


def _merged(rows: Iterable[list[str]]) -> list[list[str]]:
    """Return `rows`, each of a rank, but one for successive ranks whose rows are otherwise equal."""
    found = []
    for cells, equal in groupby(rows, key=lambda row: row[1:]):
        first, *others = [row[0] for row in equal]
        found.append([f"{first} – {others[-1]}, each" if others else first, *cells])
    return found


def _work(rank: dict[str, Any]) -> list[str]:
    (first, stop), blocks = rank["samples"], rank["blocks"]
    layers = "all" if not blocks else blocks[0] if len(blocks) == 1 else f"{blocks[0]} … {blocks[-1]}"
    messages = ", ".join(f"{each['calls']} {name}" for name, each in rank["messages"].items())
    sent = f"{size(rank['sent_bytes'])} ({messages})" if messages else "nothing"
    computed = flops(rank["forward_flops"]), flops(rank["backward_flops"])
    return [str(rank["rank"]), layers, str(stop - first), *computed, sent]


def _memory(rank: dict[str, Any]) -> list[str]:
    totals = sum(rank["peak"].values()), rank["placed_bytes"], sum(rank["kept"].values())
    return [str(rank["rank"]), *(size(rank["peak"][kind]) for kind in KINDS), *map(size, totals)]


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
    count = sum(rank["forward_flops"] + rank["backward_flops"] for rank in ranks)
    memory = f"{size(ranks[0]['peak_bytes'])} (the tensors of rank 0)"
    return [
        ["peak of the memory", memory, f"{size(measured['peak_bytes'])} ({measured['peak_of']})"],
        ["time of a step", "–", f"{milliseconds(measured['seconds'])} in the median"],
        ["throughput", "–", f"{significant(measured['samples_per_second'])} samples/s"],
        ["arithmetic of a step", flops(count), f"{flops(count / measured['seconds'])}/s"],
    ]
