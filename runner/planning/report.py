"""The plan of a run as plain values: ranks, batch, memory, costs and checkpoints, and what the run has measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from models.blocks import blocks_of
from runner.batching import Plan
from runner.config.errors import ConfigError
from runner.device import device_name
from runner.model.base import without_memory
from runner.parallel.dp import DP
from runner.parallel.pipeline import Pipeline
from runner.parallel.pipelining.bubble_prediction import bubbles
from runner.parallel.pipelining.partition import positions_of
from runner.planning.costs import Machine
from runner.planning.fake_step import RankPlan, trace_blocks
from runner.planning.measure import Parts, neighbors, step_seconds
from runner.planning.planned_session import plan_of
from runner.run import Run
from runner.session import Session
from runner.storage.saved_run import checkpoints
from runner.system.memory import host_memory


def report_of(
    run: Run,
    session: Session,
    ranks: Sequence[RankPlan],
    num_devices: int | None = None,
    machine: Machine | None = None,
    parts: Parts | None = None,
) -> dict[str, Any]:
    """Return the plan of a run as plain values, which can be written as JSON.

    Args:
        run: the run.
        session: its session in this process.
        ranks: the memory and the costs of a step on each rank.
        num_devices: number of devices of the machine that is planned for; None for those of this machine.
        machine: the speeds of the machine, for a lower bound on the time of a step; None to leave out the bound.
        parts: the measured parts of a step, from which the time of a step is predicted; None to leave out this time.

    Returns:
        A dict with these keys:

        - `run`: descriptions of the workload, the parallel mode and the precision;
        - `batch`: `batch_size`, `data_shards`, `accumulation` and `pipeline_micro_batches`; and `samples_per_pass`,
          which is `batch_size` divided by `data_shards`, by `accumulation` and by `pipeline_micro_batches`;
        - `length`: `steps`, `samples`, `steps_per_epoch` and `epochs`; the last two are None without epochs;
        - `ranks`: a list with a dict for each rank. Its keys are `rank`, `blocks`, `samples` (the start and stop of its
          samples in a batch), `forward_flops`, `backward_flops`, `messages`, `sent_bytes` and `least_seconds` (a lower
          bound on the time of a step; None without `machine`). Four more keys have the memory of tensors in bytes:
          `peak_bytes` (the maximum), `placed_bytes` (the maximum before the first step), `peak` (a dict by kind, at
          the peak of a step) and `kept` (a dict by kind, between two steps);
        - `pipeline`: None unless the parallel mode is a pipeline. Otherwise a dict: `schedule`, `num_micro_batches` and
          `bubbles`, the list that the function `bubbles` returns. If `parts` is given, the dict of each schedule in
          this list also has the predicted `step_seconds`;
        - `step`: the predicted `seconds` and `samples_per_second`, the measured `parts` and, for a pipeline, the
          `fastest` schedule; None without `parts`;
        - `checkpoint`: the `bytes` of a checkpoint, and the `disk_bytes` that the run needs at most;
        - `host`: None if `num_devices` is given. Otherwise a dict: `memory_of`, which is `host` or the name of the GPU;
          `tensor_bytes`, the memory that the tensors need there, of all processes on the host, or of the process that
          needs most on its GPUs; and `available_bytes`, the memory that the host has available, or that the GPUs have;
        - `notes`: a list of remarks, such as what the memory does not include;
        - `memory_bytes`, `fits` and `measured`, which are None, and `remedies`, an empty list; the caller may set them.
    """
    pipeline = _pipeline(run, session, parts)
    return {
        "run": _described(run),
        "batch": _batch(session.plan),
        "length": _length(session),
        "ranks": [_rank(run, session, each, machine) for each in ranks],
        "pipeline": pipeline,
        "step": None if parts is None else _step(session, parts, pipeline),
        "checkpoint": _checkpoint(run, ranks),
        "host": _machine(session, ranks) if num_devices is None else None,
        "memory_bytes": None,
        "fits": None,
        "remedies": [],
        "notes": _notes(run, session, num_devices),
        "measured": None,
    }


def measured(session: Session, result: Mapping[str, Any], directory: Path) -> dict[str, Any] | None:
    """Return what a run has measured, for comparison with a plan; None if the times of its steps were not measured.

    Args:
        session: the prepared run.
        result: the content of the run's `result.json`.
        directory: the run directory, whose newest checkpoint is measured, too.

    Returns:
        A dict: `seconds`, the median in `Result.step_seconds`; `samples_per_second`; `peak_bytes`, the peak of the
        memory, and `peak_of`, a text that says what this peak counts; and `checkpoint_bytes`, None if there is no
        checkpoint.
    """
    if not result.get("step_seconds"):
        return None
    peak_of = {"cpu": "the process of rank 0", "cuda": "the tensors of its first device"}  # see `memory.usage`
    return {
        "seconds": result["step_seconds"]["median"],
        "samples_per_second": result.get("samples_per_second", 0.0),
        "peak_bytes": result.get("peak_memory_bytes", 0),
        "peak_of": peak_of.get(session.device.type, "its device"),
        "checkpoint_bytes": _newest_checkpoint_bytes(directory),
    }


def _newest_checkpoint_bytes(directory: Path) -> int | None:
    """Return the size of a run's newest checkpoint; None if there is none, or if it cannot be read."""
    try:
        saved = checkpoints(directory)
        return sum(file.lstat().st_size for file in saved[-1].iterdir()) or None if saved else None
    except (OSError, ConfigError):
        return None


def _described(run: Run) -> dict[str, str]:
    return {
        **run.workload.describe(),
        "parallel": run.parallel.description,
        "precision": type(run.precision).description,
    }


def _batch(plan: Plan) -> dict[str, Any]:
    return {
        "batch_size": plan.batch_size,
        "data_shards": plan.data_shard[1],
        "accumulation": plan.accumulation,
        "pipeline_micro_batches": plan.chunks,
        "samples_per_pass": plan.chunk_size,
    }


def _length(session: Session) -> dict[str, Any]:
    size = session.plan.batch_size
    epoch = session.workload.steps_per_epoch(size)
    return {
        "steps": session.num_steps,
        "samples": session.num_steps * size,
        "steps_per_epoch": epoch,
        "epochs": epoch and session.num_steps / epoch,
    }


def _rank(run: Run, session: Session, rank: RankPlan, machine: Machine | None) -> dict[str, Any]:
    world_size = session.world_size
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
        "sent_bytes": rank.costs.sent_bytes(world_size),
        "least_seconds": rank.costs.seconds(machine, world_size) if machine else None,
    }


def _pipeline(run: Run, session: Session, parts: Parts | None) -> dict[str, Any] | None:
    """Return the bubbles of a pipeline and, if `parts` were measured, the times of a step; None for other modes."""
    mode, batch = run.parallel, _batch(session.plan)
    if not isinstance(mode, Pipeline):
        return None
    samples = batch["batch_size"] // batch["accumulation"]
    stages = max(2, len(session.devices))
    num_workers = session.world_size if mode.engine == "processes" else mode.asked_stages or stages
    cuts = None
    if mode.cuts != "auto":
        model = without_memory(session.workload.build_model)
        cuts = positions_of(mode.cuts, [name for name, _ in blocks_of(model)])
    if parts is None:
        operations = trace_blocks(run, session, batch["samples_per_pass"])
        rows = bubbles(mode.schedules, num_workers, samples, lambda size: operations, mode.asked_stages, cuts)
    else:
        rows = bubbles(mode.schedules, num_workers, samples, parts.blocks, mode.asked_stages, cuts)
        _add_step_seconds(session, parts, rows, mode.schedule)
    return {"schedule": mode.schedule, "num_micro_batches": batch["pipeline_micro_batches"], "bubbles": rows}


def _add_step_seconds(session: Session, parts: Parts, rows: Sequence[dict[str, Any]], schedule: str) -> None:
    """Add the predicted `step_seconds` to the dict of each schedule in `rows`, the result of `bubbles`.

    `schedule`, the schedule of the config, was measured with some split sizes. The differences between the measured and
    the simulated times of `schedule` are used to correct the simulated times of all schedules and split sizes.
    """
    measured = {int(size): seconds for size, seconds in parts.values["pipelines"].items()}
    simulated = {row["split_size"]: row[schedule] for row in rows}
    for row in rows:
        low, high, share = neighbors(sorted(measured), row["split_size"])
        for cell in (cell for cell in row.values() if isinstance(cell, dict)):
            at_low, at_high = (_corrected(cell, simulated[size], measured[size]) for size in (low, high))
            more = at_low + share * (at_high - at_low) - parts.values["last_pass"]
            cell["step_seconds"] = step_seconds(session, parts) + session.plan.accumulation * more


def _corrected(cell: dict[str, float], simulated: dict[str, float], measured: float) -> float:
    """Return the predicted time of one accumulation step of a pipeline, in seconds.

    The simulation `cell` of this pipeline is corrected by comparing the measured time of a reference pipeline with its
    simulated time. If the reference pipeline took longer than simulated, its additional time per round is added for
    each round of `cell`. If the reference pipeline took less time than simulated, the time of `cell` is reduced by the
    same ratio.

    Args:
        cell: the simulation to correct: the value for one schedule in the result of `bubbles`.
        simulated: the simulation of the reference pipeline, with the same keys as `cell`.
        measured: the measured time of one accumulation step of the reference pipeline, in seconds.
    """
    overhead = max(0.0, measured - simulated["time"]) / simulated["rounds"]
    return cell["time"] * min(1.0, measured / simulated["time"]) + cell["rounds"] * overhead


def _step(session: Session, parts: Parts, pipeline: dict[str, Any] | None) -> dict[str, Any]:
    """Return the measured parts of a step, its predicted time and, for a pipeline, the fastest schedule."""
    seconds = step_seconds(session, parts)
    return {
        "seconds": seconds,
        "samples_per_second": session.plan.samples_per_round / seconds,
        "parts": parts.values,
        "fastest": _fastest(pipeline["bubbles"]) if pipeline else None,
    }


def _fastest(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the schedule, the split size and the seconds of the shortest step in `rows`."""
    cells = [(cell["step_seconds"], row, key) for row in rows for key, cell in row.items() if isinstance(cell, dict)]
    seconds, row, schedule = min(cells, key=lambda cell: cell[0])
    return {"schedule": schedule, "split_size": row["split_size"], "seconds": seconds}


def _checkpoint(run: Run, ranks: Sequence[RankPlan]) -> dict[str, int]:
    """Return the size of a checkpoint, and the room on the disk that the run needs at most, in bytes."""
    saved = {name: size for rank in ranks for name, size in rank.saved.items()}
    size = sum(saved.values())
    # Those that are kept (the newest one always is until the run ends), the best one, and one that is being written.
    return {"bytes": size, "disk_bytes": size * (max(1, run.keep) + 2)}


def _machine(session: Session, ranks: Sequence[RankPlan]) -> dict[str, Any]:
    """Return the memory in bytes that tensors need on a device of this machine, and the memory that there is.

    On CPUs, this is the memory of all processes together; otherwise, that of the device that needs most.
    """
    device, peaks = session.device, [rank.peak_bytes for rank in ranks]
    if device.type == "cpu":
        return {
            "memory_of": "host",
            "tensor_bytes": sum(peaks),
            "available_bytes": host_memory()["available_bytes"] or 0,
        }
    if device.type == "cuda":
        num_devices = len(session.devices)  # of each process, whose plan has the sum of their memory
        total = torch.cuda.get_device_properties(device).total_memory * num_devices
    else:
        total = torch.mps.recommended_max_memory()
    return {"memory_of": device_name(device), "tensor_bytes": max(peaks), "available_bytes": total}


def _notes(run: Run, session: Session, num_devices: int | None) -> list[str]:
    notes = ["Only tensors are counted; each process takes 0.5 to 0.7 GB more for Python and torch."]
    if session.device.type == "cuda" or num_devices is not None:
        notes[0] = (
            "Only tensors are counted; a CUDA context, cuDNN's workspaces and what the allocator keeps are additional."
        )
    if run.compile:
        notes.append("The plan is that of compile=false; a compiled model keeps fewer activations.")
    if getattr(run.parallel, "cuts", None) == "auto":
        notes.append("parallel.cuts=auto measures the blocks; here their floating-point operations are compared.")
    if session.world_size > 1 and run.parallel.difference:
        notes.append(f"Not what a single device computes: {run.parallel.difference}.")
    if len(session.devices) > 1:
        notes.append("One process has all devices; the memory is their sum.")
        if isinstance(run.parallel, DP):
            notes.append(
                "A step of DataParallel also copies the parameters to every other GPU, with gradients of them."
            )
    return notes
