"""Functions that render a plan as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from runner.parallel.pipelining.schedules import SCHEDULES
from runner.planning.formatting import flops, milliseconds, significant, size
from runner.planning.memory_tracker import KINDS

_MOST_RANKS = 8
"""If there are more ranks than this, and all do the same work, they share a row."""


def render(report: dict[str, Any]) -> Group:
    """Render `report`, the result of `runner.planning.report.report_of`, as tables."""
    parts = [_table(title, titles, rows) for title, titles, rows in tables(report)]
    return Group(*parts, *(Text(f"note: {note}", style="dim") for note in report["notes"]), Text(verdict(report)))


def tables(report: dict[str, Any]) -> list[tuple[str, list[str], list[list[str]]]]:
    """Return the title, the column titles and the rows of each table that `render` shows for `report`."""
    ranks = report["ranks"]
    found = [
        ("run", ["", ""], [[key, text] for key, text in _overview(report).items()]),
        ("work", ["rank", "layers", "samples of a batch", *_work_titles(ranks)], _work_rows(ranks)),
        (
            "memory of tensors at the peak of a step",
            ["rank", *KINDS, "sum", "before the first step", "between steps"],
            _memory_rows(ranks),
        ),
    ]
    if report["pipeline"]:
        rows = report["pipeline"]["bubbles"]
        titles = [key.replace("_", " ") for key in rows[0] if key not in SCHEDULES]
        schedules = [key for key in rows[0] if key in SCHEDULES]
        cells = [
            [str(row["split_size"]), str(row["num_micro_batches"]), *(_bubble(row, name, report) for name in schedules)]
            for row in rows
        ]
        timed = ", and time of a step" if report["step"] else ""
        found.append((f"bubble: idle share of the processes' time{timed}", [*titles, *schedules], cells))
    if report["measured"]:
        found.append(("predicted and measured", ["", "predicted", "measured"], _comparison(report)))
    if report["remedies"]:
        rows = [
            [
                " ".join(each["overrides"]),
                size(each["peak_bytes"]),
                "yes" if each["fits"] else "no",
                each["costs"],
                each["results"],
            ]
            for each in report["remedies"]
        ]
        found.append(
            ("changes that need less memory, the cheapest first", ["add", "peak", "fits", "costs", "results"], rows)
        )
    return found


def _comparison(report: dict[str, Any]) -> list[list[str]]:
    """Return a row for each property that a run has measured: its name, the predicted and the measured value."""
    ranks, step, measured = report["ranks"], report["step"], report["measured"]
    seconds, saved = measured["seconds"], measured["checkpoint_bytes"]
    count = sum(rank["forward_flops"] + rank["backward_flops"] for rank in ranks)
    memory = f"{size(ranks[0]['peak_bytes'])} (the tensors of rank 0)"
    return [
        ["peak of the memory", memory, f"{size(measured['peak_bytes'])} ({measured['peak_of']})"],
        ["time of a step", milliseconds(step["seconds"]) if step else "–", f"{milliseconds(seconds)} in the median"],
        [
            "throughput",
            f"{significant(step['samples_per_second'])} samples/s" if step else "–",
            f"{significant(measured['samples_per_second'])} samples/s",
        ],
        ["arithmetic of a step", flops(count), f"{flops(count / seconds)}/s"],
        ["size of a checkpoint", size(report["checkpoint"]["bytes"]), size(saved) if saved else "–"],
    ]


def verdict(report: dict[str, Any]) -> str:
    """Return whether the run fits into the memory of the devices, as text; empty if `fits` in `report` is None."""
    if report["fits"] is None:
        return ""
    peak = max(rank["peak_bytes"] for rank in report["ranks"])
    answer = "fits" if report["fits"] else "does not fit"
    return f"it {answer}: {size(peak)} of {size(report['memory_bytes'])}"


def _overview(report: dict[str, Any]) -> dict[str, str]:
    batch, length, checkpoint, host = (report[key] for key in ("batch", "length", "checkpoint", "host"))
    count, epoch = length["epochs"], length["steps_per_epoch"]
    epochs = f", {significant(count, 3)} epochs of {significant(epoch)} steps" if count else ""
    saved = f"{size(checkpoint['bytes'])}; at most {size(checkpoint['disk_bytes'])} on the disk"
    lines = report["run"] | {
        "batch": _batch(batch),
        "length": f"{length['steps']:,} steps, {length['samples']:,} samples{epochs}",
        "checkpoint": saved,
    }
    if step := report["step"]:
        lines["step"] = f"{milliseconds(step['seconds'])}, {significant(step['samples_per_second'])} samples/s"
        lines["of which"] = _parts(step["parts"])
        if fastest := step["fastest"]:
            words = f"parallel.schedule={fastest['schedule']} parallel.split_size={fastest['split_size']}"
            lines["fastest"] = f"{milliseconds(fastest['seconds'])} with {words}"
    if host:
        of = "available" if host["memory_of"] == "host" else f"on {host['memory_of']}"
        lines["this machine"] = f"{size(host['tensor_bytes'])} for tensors, {size(host['available_bytes'])} {of}"
    return lines


def _parts(parts: dict[str, Any]) -> str:
    """Return the measured times of the parts of a step."""
    names = {
        "pass": "a pass",
        "last_pass": "the last pass" if parts.get("pass") else "the pass",
        "batch": "a batch",
        "update": "the update",
    }
    return ", ".join(f"{text} {significant(parts[key] * 1e3, 3)} ms" for key, text in names.items() if parts.get(key))


def _batch(batch: dict[str, Any]) -> str:
    factors = [
        (batch["data_shards"], "processes"),
        (batch["accumulation"], "accumulated"),
        (batch["pipeline_micro_batches"], "micro-batches"),
    ]
    parts = [f"{count} {name}" for count, name in factors if count > 1]
    return " = ".join(
        [f"{batch['batch_size']} samples", " × ".join([*parts, str(batch["samples_per_pass"])])][: 1 + bool(parts)]
    )


def _bubble(row: dict[str, Any], schedule: str, report: dict[str, Any]) -> str:
    """Return the bubble of a schedule as a percentage and, if `report` has it, the predicted time of a step."""
    pipeline = report["pipeline"]
    if row[schedule] is None:
        return "–"
    own = (schedule, row["num_micro_batches"]) == (pipeline["schedule"], pipeline["num_micro_batches"])
    cell = row[schedule]
    timed = f", {milliseconds(cell['step_seconds'])}" if "step_seconds" in cell else ""
    return f"{'this config: ' * own}{cell['bubble']:.1%}{timed}"


def _work_titles(ranks: Sequence[dict[str, Any]]) -> list[str]:
    timed = ["at least"] if ranks[0]["least_seconds"] is not None else []
    return ["forward", "backward", "sent", *timed]


def _work(rank: dict[str, Any]) -> list[str]:
    first, stop = rank["samples"]
    blocks = rank["blocks"]
    layers = "all" if not blocks else blocks[0] if len(blocks) == 1 else f"{blocks[0]} … {blocks[-1]}"
    messages = ", ".join(f"{each['calls']} {name}" for name, each in rank["messages"].items())
    cells = [
        str(rank["rank"]),
        layers,
        f"{first} – {stop - 1}",
        flops(rank["forward_flops"]),
        flops(rank["backward_flops"]),
    ]
    cells.append(f"{size(rank['sent_bytes'])} ({messages})" if messages else "nothing")
    if rank["least_seconds"] is not None:
        cells.append(f"{significant(rank['least_seconds'] * 1e3, 3)} ms")
    return cells


def _work_rows(ranks: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return a row for each rank; only one row if there are many ranks that differ only in their samples."""
    rows = [_work(rank) for rank in ranks]
    same = all((row[1], row[3:]) == (rows[0][1], rows[0][3:]) for row in rows)
    if len(rows) <= _MOST_RANKS or not same:
        return rows
    first, stop = ranks[0]["samples"]
    return [[f"0 – {len(rows) - 1}", rows[0][1], f"{stop - first} each", *rows[0][3:]]]


def _memory_rows(ranks: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return a row for each rank; only one row if all ranks need the same memory."""
    rows = [_memory(rank) for rank in ranks]
    if len(rows) > 1 and all(row[1:] == rows[0][1:] for row in rows):
        return [[f"0 – {len(rows) - 1}, each", *rows[0][1:]]]
    return rows


def _memory(rank: dict[str, Any]) -> list[str]:
    at_peak = sum(rank["peak"].values())
    kept = sum(rank["kept"].values())
    return [
        str(rank["rank"]),
        *(size(rank["peak"][kind]) for kind in KINDS),
        *map(size, (at_peak, rank["placed_bytes"], kept)),
    ]


def _table(title: str, titles: Sequence[str], rows: Iterable[Sequence[str]]) -> RenderableType:
    table = Table(box=SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", show_header=any(titles))
    for number, name in enumerate(titles):
        table.add_column(Text(name), overflow="fold", justify="left" if number == 0 or not any(titles) else "right")
    for row in rows:
        table.add_row(*map(Text, row))
    return table
