"""The plan of a run as plain values and as tables, and changes that need less memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby, pairwise
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from runner.config.errors import ConfigError
from runner.device import device_name
from runner.parallel.dp import DP
from runner.parallel.pipeline import Pipeline
from runner.parallel.pipelining.partition import balanced, positions_of
from runner.parallel.pipelining.schedules import SCHEDULES, STAGES_EACH, divisors, violation
from runner.parallel.session import Session
from runner.planning.fake_step import RankPlan, block_flops, plan_of, prepared, trace_ranks
from runner.planning.step_tracker import KINDS
from runner.run import Run
from runner.system.accelerator import total_bytes
from runner.system.memory import host_memory
from runner.system.tables import flops, pairs, significant, size, table

_CHECKPOINTED = "model.checkpoint_activations=true"

CHANGES = {
    ("accumulation=4",): "smaller matrices",
    (_CHECKPOINTED,): "about a third more arithmetic",
    ("parallel=fsdp",): "parameters are sent twice per micro-batch",
    ("precision=bf16",): "16-bit arithmetic",
    (_CHECKPOINTED, "accumulation=8"): "about a third more arithmetic; smaller matrices",
    ("parallel=fsdp", _CHECKPOINTED, "accumulation=8"): "about a third more arithmetic; smaller matrices; messages",
}
"""What each change costs that may make a run fit into memory, by the overrides to add; the cheapest first."""


def report_of(run: Run, session: Session, ranks: Sequence[RankPlan], num_devices: int | None = None) -> dict[str, Any]:
    """Return the plan of a run as plain values, which can be written as JSON.

    `ranks` are the memory and the costs of a step on each rank; `num_devices` is None for the devices of this machine.

    Returns:
        A dict. In `ranks`, `samples` is the start and stop of the rank's samples in a batch, and all memory is in
        bytes: `peak_bytes`, the maximum; `placed_bytes`, the maximum before the first step; `peak` and `kept`, by kind,
        at the peak of a step and between two steps. In `host`, which is None if `num_devices` is given, `tensor_bytes`
        is what the tensors of all processes need on a CPU, or those of the process that needs most on its GPUs.
        `memory_bytes` and `fits` are None, and `remedies` is empty; the caller may set them.
    """
    steps, epoch, plan = session.num_steps, session.steps_per_epoch, session.plan
    checkpoint = sum({name: size for rank in ranks for name, size in rank.saved.items()}.values())
    state, shared = run.workload.state_bytes()
    checkpoint += state
    return {
        "run": {
            **run.workload.describe(),
            "parallel": run.parallel.description,
            "precision": type(run.precision).description,
        },
        "batch": {
            "batch_size": plan.batch_size,
            "data_shards": plan.data_shard[1],
            "accumulation": plan.accumulation,
            "pipeline_micro_batches": plan.chunks,
            "samples_per_pass": plan.chunk_size,
        },
        "length": {
            "steps": steps,
            "samples": steps * run.batch_size,
            "steps_per_epoch": epoch,
            "epochs": epoch and steps / epoch,
        },
        "ranks": [_rank(run, session, each) for each in ranks],
        "pipeline": _pipeline(run, session),
        # Those that are kept (the newest one always is until the run ends), the best one, and one being written.
        "checkpoint": {"bytes": checkpoint, "disk_bytes": checkpoint * (max(1, run.keep) + 2) + shared},
        "host": _machine(session, ranks) if num_devices is None else None,
        "memory_bytes": None,
        "fits": None,
        "remedies": [],
        "notes": _notes(run, session),
    }


def remedies(run: Run, build: Callable[[Sequence[str]], Run], num_devices: int, memory: float) -> list[dict[str, Any]]:
    """Return the three cheapest changes of how a run is trained that make it fit, or fewer if there are not as many.

    Args:
        run: the run that does not fit.
        build: function that returns the run with a change, given its overrides; it may raise ConfigError.
        num_devices: number of devices of the machine.
        memory: memory of each device in bytes.

    Returns:
        For each change its `overrides`, what it `costs`, and `peak_bytes`, the memory of the rank that needs most.
    """
    found: list[dict[str, Any]] = []
    for overrides, costs in CHANGES.items():
        if num_devices == 1 and overrides[0].startswith("parallel="):
            continue
        try:
            changed = build(overrides)
            ranks = trace_ranks(changed, prepared(changed, num_devices))
        except ConfigError:
            continue
        if ranks[0].normalizes and ("parallel=fsdp" in overrides or "accumulation" in overrides[-1]):
            costs += "; batch normalization sees smaller batches"
        if (peak := max(rank.peak_bytes for rank in ranks)) <= memory:
            found.append({"overrides": list(overrides), "costs": costs, "peak_bytes": peak})
        if len(found) == 3:
            break
    return found


def advice_when_out_of_memory(run: Run, build: Callable[[Sequence[str]], Run]) -> Iterator[str]:
    """Yield lines for a run that is out of memory: what its plan counts, and changes that need less (see `remedies`).

    A change is named if it saves a tenth of the memory, as a plan counts tensors only.
    """
    session = prepared(run)
    device, ranks = session.device, trace_ranks(run, session)
    rank = max(ranks, key=lambda rank: rank.peak_bytes)
    on_host = device.type == "cpu"
    room = host_memory()["total_bytes"] or 0 if on_host else total_bytes(device)
    needed = sum(each.peak_bytes for each in ranks) if on_host else rank.peak_bytes
    where = "this machine has" if on_host else f"{device} has"
    kinds = ", ".join(f"{kind} {size(count)}" for kind, count in rank.peak.items() if count)
    yield f"tensors need {size(needed)} according to the plan, and {where} {size(room)}; rank {rank.rank}: {kinds}"

    limit = 0.9 * min(rank.peak_bytes, room / (len(ranks) if on_host else 1))
    for each in remedies(run, build, max(session.world_size, len(session.devices)), limit):
        yield f"needs {size(each['peak_bytes'])} per process: {' '.join(each['overrides'])} ({each['costs']})"


def bubbles(
    schedules: Sequence[str],
    num_workers: int,
    samples: int,
    costs: Sequence[float],
    num_stages: int | None = None,
    cuts: Sequence[int] | None = None,
) -> list[dict[str, Any]]:
    """Return the bubble of each schedule for each number of micro-batches that divides `samples`.

    It is None if the schedule does not support this number of micro-batches or stages, or if there are too few blocks.

    Args:
        num_workers: number of processes or, with `engine=streams`, of stages.
        samples: number of samples in one pass through the pipeline.
        costs: the cost of a forward and backward pass of each block, in any unit.
        num_stages: number of stages; None for one stage per worker, or two with `interleaved_1f1b`.
        cuts: index of the first block of every stage except the first; None for stages of about the same cost.
    """
    stages = {name: _stages(name, num_workers, costs, num_stages, cuts) for name in schedules}
    return [
        {"split_size": samples // count, "num_micro_batches": count}
        | {name: _bubble(name, num_workers, count, stages[name]) for name in schedules}
        for count in divisors(samples)
    ]


def _stages(
    schedule: str, num_workers: int, costs: Sequence[float], asked: int | None, cuts: Sequence[int] | None
) -> list[float]:
    """Return the cost of each stage; none if the schedule does not support the number of stages."""
    least, most = STAGES_EACH[schedule]
    count = asked or num_workers * least
    if count % num_workers or not least <= count // num_workers <= most or count > len(costs):
        return []
    bounds = [0, *(balanced(costs, count) if cuts is None else cuts), len(costs)]
    return [sum(costs[start:stop]) for start, stop in pairwise(bounds)]


def _bubble(schedule: str, num_workers: int, num_micros: int, stages: Sequence[float]) -> float | None:
    """Return the bubble of a schedule.

    The slowest worker computes without a pause, and waits only while the pipeline fills and drains. With equal stages,
    that takes p − 1 of m + p − 1 rounds for p workers and m micro-batches (Huang et al., GPipe, 2019, section 2.3).
    With v stages per worker, it takes 1 / v of that time (Narayanan et al., 2021, section 2.2). A zero-bubble schedule
    computes the gradients of weights meanwhile, so that a third of it remains (Qi et al., 2023, ZB-H1).
    """
    if not any(stages) or violation(schedule, len(stages), num_workers, num_micros):
        return None
    workers = [sum(stages[worker::num_workers]) for worker in range(num_workers)]
    parts = (3 if schedule == "zero_bubble" else 1) * (len(stages) // num_workers)
    filling = (sum(workers) - max(workers)) / parts
    return 1 - num_micros * sum(workers) / (num_workers * (num_micros * max(workers) + filling))


def _rank(run: Run, session: Session, rank: RankPlan) -> dict[str, Any]:
    index, count = plan_of(run, session, rank.rank).data_shard
    share = session.plan.batch_size // count
    backward = rank.costs.backward_flops
    return {
        "rank": rank.rank,
        "blocks": rank.blocks,
        "samples": [index * share, (index + 1) * share],
        "peak_bytes": rank.peak_bytes,
        "peak": rank.peak,
        "placed_bytes": rank.placed,
        "kept": rank.kept,
        "forward_flops": rank.costs.flops - backward,
        "backward_flops": backward,
        "messages": {name: {"calls": each[0], "bytes": each[1]} for name, each in rank.costs.messages.items()},
        "sent_bytes": rank.costs.sent_bytes(session.world_size),
    }


def _pipeline(run: Run, session: Session) -> dict[str, Any] | None:
    mode, plan = run.parallel, session.plan
    if not isinstance(mode, Pipeline):
        return None
    flops = block_flops(run, session)
    cuts = None if mode.cuts == "auto" else positions_of(mode.cuts, list(flops))
    num_workers = session.world_size if mode.in_processes else mode.num_stages(session)
    schedules = SCHEDULES if mode.in_processes else (mode.schedule,)
    rows = bubbles(schedules, num_workers, plan.micro_size, list(flops.values()), mode.asked_stages, cuts)
    return {"schedule": mode.schedule, "num_micro_batches": plan.chunks, "bubbles": rows}


def _machine(session: Session, ranks: Sequence[RankPlan]) -> dict[str, Any]:
    device, peaks = session.device, [rank.peak_bytes for rank in ranks]
    if device.type == "cpu":
        available = host_memory()["available_bytes"] or 0
        return {"memory_of": "host", "tensor_bytes": sum(peaks), "available_bytes": available}
    total = total_bytes(device) * len(session.devices)  # of each process, whose plan has the sum of their memory
    return {"memory_of": device_name(device), "tensor_bytes": max(peaks), "available_bytes": total}


def _notes(run: Run, session: Session) -> list[str]:
    others = "Python and torch take 0.5 to 0.7 GB more, on a GPU with the CUDA context and cached memory"
    notes = [f"Only tensors are counted. In each process, {others}, and libraries the scratch memory of an operation."]
    if shared := run.workload.state_bytes()[1]:
        notes.append(f"Checkpoints share files of at most {size(shared)}, which hold the frames of the replay buffer.")
    if run.compile:
        notes.append("The plan is that of compile=false; a compiled model keeps fewer activations.")
    if getattr(run.parallel, "cuts", None) == "auto":
        notes.append("parallel.cuts=auto measures the blocks; here their floating-point operations are compared.")
    if len(session.devices) > 1:
        notes.append("One process has all devices; the memory is their sum.")
    if len(session.devices) > 1 and isinstance(run.parallel, DP):
        notes.append("A step of DataParallel also copies the parameters to every other GPU, with gradients of them.")
    return notes


# ---------------------------------------------------------------------------------------------------------------------
# Tables


def render(report: dict[str, Any]) -> Group:
    """Render `report`, the result of `report_of`, as tables."""
    work = ["rank", "layers", "samples of a batch", "forward", "backward", "sent"]
    memory = ["rank", *KINDS, "sum", "before the first step", "between steps"]
    parts: list[RenderableType] = [
        pairs("run", _overview(report)),
        table("work", work, _merged(map(_work, report["ranks"])), right_from=1),
        table("memory of tensors at the peak of a step", memory, _merged(map(_memory, report["ranks"])), right_from=1),
    ]
    if report["pipeline"]:
        parts.append(_bubbles(report["pipeline"]))
    if report["remedies"]:
        rows = [[" ".join(each["overrides"]), size(each["peak_bytes"]), each["costs"]] for each in report["remedies"]]
        parts.append(table("changes with which it fits, the cheapest first", ["add", "peak", "costs"], rows, 1))
    parts += [Text(f"note: {note}", style="dim") for note in report["notes"]]
    if report["fits"] is not None:
        peak = max(rank["peak_bytes"] for rank in report["ranks"])
        fits = "fits" if report["fits"] else "does not fit"
        parts.append(Text(f"it {fits}: {size(peak)} of {size(report['memory_bytes'])}"))
    return Group(*parts)


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
    columns = ["split size", "num micro batches", *schedules]
    return table("bubble: idle share of the processes' time", columns, rows, right_from=1)
