"""Compares plans with measurements: the peak memory of tensors on each rank, and the step time.

All runs are on a CPU, with one thread per process.

- `python -m benchmarks.plan memory [CASE]…`: the profiler records the allocations of the first two steps. The
  allocations are the same in each repeat, except with fsdp on gloo, whose threads release copies of gradients at
  varying times. The time that it takes to make a plan is measured, too.
- `python -m benchmarks.plan time`: the step time that `plan --measure` predicts is compared with the median step time
  of a run. Plans and runs alternate.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.measure import command, result, write
from runner.commands.composed_run import compose_run
from runner.parallel.collectives import Collectives
from runner.result import Result
from runner.run import build_run
from runner.training import prepare, train_step

GOAL = 0.05
RESNET50 = ("workload=resnet50", "batch_size=32", "data.num_samples=128")
RESNET18 = ("model=resnet18", "data=synthetic", "data.size=64", "data.num_samples=256", "batch_size=64")
RECOMPUTED = "model.checkpoint_activations=true"
CUT = ("parallel=pipeline", "parallel.cuts=[layer3.1]")
CASES: dict[str, tuple[str, ...]] = {
    "convnet": ("model=convnet", "batch_size=256"),
    "resnet18": RESNET18,
    "resnet50": RESNET50,
    "resnet50, accumulation 4": (*RESNET50, "accumulation=4"),
    "resnet50, recomputed": (*RESNET50, RECOMPUTED),
    "resnet50, recomputed, accumulation 4": (*RESNET50, RECOMPUTED, "accumulation=4"),
    "resnet50, bf16": (*RESNET50, "precision=bf16"),
    "resnet50, bf16, accumulation 4": (*RESNET50, "precision=bf16", "accumulation=4"),
    "resnet50, bf16, recomputed": (*RESNET50, "precision=bf16", RECOMPUTED),
    "dqn": ("workload=dqn",),
    "resnet50, ddp × 2": (*RESNET50, "parallel=ddp"),
    "resnet50, fsdp × 2": (*RESNET50, "parallel=fsdp"),
    "resnet50, pipeline × 2": (*RESNET50, *CUT),
    "resnet50, pipeline × 2, 1f1b, 16 micro-batches": (
        *(*RESNET50, *CUT),
        *("parallel.schedule=1f1b", "parallel.num_micro_batches=16"),
    ),
}


TIMED = ("workload=resnet50", "batch_size=24", "data.num_samples=96", "device=cpu", "device.threads=1")
MODES = {"single": (), "ddp × 2": ("parallel=ddp",), "fsdp × 2": ("parallel=fsdp",)}
PIPELINES = [(schedule, size) for schedule in ("gpipe", "zero_bubble") for size in (3, 6, 12)]
STEPS = 8
TIME_GOAL = 0.15


def main() -> None:
    """Plan and measure the cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="?", choices=("memory", "time"))
    parser.add_argument("cases", nargs="*", help="beginnings of the names of cases (default: all)")
    parser.add_argument("--repeats", type=int, default=5, help="of the measurements with fsdp, and of the plans' times")
    parser.add_argument("--run", choices=CASES, help="measure one case, and print the peak of each rank")
    arguments = parser.parse_args()
    if arguments.run:
        from benchmarks.plan import measured  # other ranks import its functions by name, and cannot import `__main__`

        print(json.dumps(measured(arguments.run)))
    elif arguments.what == "time":
        times(arguments.repeats)
    else:
        memory(arguments.cases, arguments.repeats)


def times(repeats: int) -> None:
    """Predict and measure step times, in turn, and write a table."""
    predicted: dict[str, list[float]] = {}
    actual: dict[str, list[float]] = {}
    for _ in range(repeats):
        for name, words in MODES.items():
            predicted.setdefault(name, []).append(planned_report([*TIMED, *words, "--measure"])["step"]["seconds"])
            actual.setdefault(name, []).append(step_time(words))
        rows = planned_report([*TIMED, "parallel=pipeline", "--measure"])["pipeline"]["bubbles"]
        by_size = {row["split_size"]: row for row in rows}
        for schedule, size in PIPELINES:
            name = f"pipeline × 2, {schedule}, split {size}"
            predicted.setdefault(name, []).append(by_size[size][schedule]["step_seconds"])
            words = ("parallel=pipeline", f"parallel.schedule={schedule}", f"parallel.split_size={size}")
            actual.setdefault(name, []).append(step_time(words))
    rows = []
    for name, values in predicted.items():
        errors = [one / other - 1 for one, other in zip(values, actual[name], strict=True)]
        error = statistics.median(errors)
        verdict = "reached" if abs(error) <= TIME_GOAL else "MISSED"
        spread = f"{min(errors):+.1%} – {max(errors):+.1%}"
        seconds = f"predicted {statistics.median(values):.3f} s, measured {statistics.median(actual[name]):.3f} s"
        print(f"  {name:<36} {seconds}: {error:+.1%} ({spread}) {verdict}")
        rows.append({"case": name, "predicted": values, "measured": actual[name], "error": error})
    print(f"  pairs that differ by more than 10 % and are ranked wrongly: {wrongly_ranked(rows) or 'none'}")
    title = "time of a step of ResNet50, 128×128, batch 24, in seconds"
    write("plan_time", [{"title": title, "rows": rows}], f"python -m benchmarks.plan time --repeats {repeats}")


def wrongly_ranked(rows: list[dict[str, Any]]) -> list[str]:
    """Return the pairs of cases for which the plan predicts the wrong case to be faster.

    Pairs whose measured times differ by at most 10 % are left out.
    """
    found = []
    for one, other in itertools.combinations(rows, 2):
        a, b = (statistics.median(each["measured"]) for each in (one, other))
        predicted = statistics.median(one["predicted"]) - statistics.median(other["predicted"])
        if max(a, b) / min(a, b) > 1.1 and (a - b) * predicted < 0:
            found.append(f"{one['case']} and {other['case']}")
    return found


def step_time(words: tuple[str, ...]) -> float:
    """Return the median step time of a short run in seconds."""
    options = [*TIMED, *words, f"steps={STEPS}", "eval_every=0", "save_every=0", "log_every=100"]
    with command(options) as directory:
        return result(directory)["step_seconds"]["median"]


def memory(cases: list[str], repeats: int) -> None:
    """Predict and measure the memory of the cases, and write a table."""
    names = [name for name in CASES if not cases or name.startswith(tuple(cases))]
    rows = []
    for name in names:
        predicted, seconds = planned(name, repeats)
        rows.append(row(name, predicted, [run(name) for _ in range(repeats if "fsdp" in name else 1)], seconds))
    print(f"  plan of resnet50: {rows[names.index('resnet50')]['seconds']} s" if "resnet50" in names else "")
    write("plan", [{"title": "peak memory of tensors in bytes", "rows": rows}], "python -m benchmarks.plan memory")


def row(name: str, predicted: list[int], repeats: list[list[int]], seconds: list[float]) -> dict[str, Any]:
    """Print the predicted and the measured memory of a case, and return them as a row of the table.

    The row also contains the largest error. The error of a rank is the relative difference between the predicted peak
    and the median of the measured peaks.

    Args:
        name: the name of the case.
        predicted: the predicted peak of each rank.
        repeats: the measured peak of each rank, for each repeat.
        seconds: the time that each plan took.
    """
    medians = [statistics.median(each) for each in zip(*repeats, strict=True)]
    errors = [prediction / median - 1 for prediction, median in zip(predicted, medians, strict=True)]
    worst = max(errors, key=abs)
    spread = [f"{min(each) / 1e6:,.1f} – {max(each) / 1e6:,.1f}" for each in zip(*repeats, strict=True)]
    verdict = "reached" if abs(worst) <= GOAL else "MISSED"
    told = ", ".join(f"{each / 1e6:,.1f}" for each in predicted)
    print(f"  {name:<48} predicted {told} MB, measured {'; '.join(spread)}: {worst:+.1%} {verdict}", flush=True)
    return {"case": name, "predicted": predicted, "measured": repeats, "error": worst, "seconds": seconds}


def planned(name: str, repeats: int) -> tuple[list[int], list[float]]:
    """Return the predicted peak of each rank, and the seconds of each plan; `resnet50` is planned `repeats` times."""
    seconds: list[float] = []
    report: dict[str, Any] = {}
    words = [*CASES[name], "device=cpu", "device.threads=1"]
    while len(seconds) < (repeats if name == "resnet50" else 1):
        since = time.perf_counter()
        report = planned_report(words)
        seconds.append(round(time.perf_counter() - since, 2))
    return [rank["peak_bytes"] for rank in report["ranks"]], seconds


def planned_report(words: Sequence[str]) -> dict[str, Any]:
    """Return the plan of a command line."""
    command = [sys.executable, "-m", "runner", "plan", *words, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the plan failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout)


def run(name: str) -> list[int]:
    """Call `measured(name)` in a new process, and return the result."""
    command = [sys.executable, "-m", "benchmarks.plan", "--run", name]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise RuntimeError(f"{name} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def measured(name: str) -> list[int]:
    """Train two steps of the case `name`, and return the measured peak of each rank.

    A case with several ranks trains in processes that this process starts. Any other case trains in this process.
    """
    run = compose_run(
        [
            *CASES[name],
            "device=cpu",
            "device.threads=1",
            "steps=2",
            *(["workload.env_steps=2000"] if name == "dqn" else []),
        ]
    )
    launcher = run.parallel.launcher(run.device)
    with tempfile.TemporaryDirectory() as scratch, launcher.connect() as process:
        rank_main = partial(measure_rank, run.config, Path(scratch))
        launcher.launch(partial(rank_main, process), rank_main, run.prepare(process), Path(scratch))
        return json.loads(Path(scratch, "peaks.json").read_text(encoding="utf-8"))


def measure_rank(config: dict[str, Any], directory: Path, process: Collectives) -> Result:
    """Train two steps of a run in `process`; rank 0 writes the peak memory of tensors of each rank to `peaks.json`."""
    torch.set_num_threads(1)
    run = build_run(config)
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recording:
        session = run.prepare(process)
        state = prepare(run, session, directory)
        batches = run.workload.batches(state.model, session.plan, 0, session.device)
        state.model.train()
        for step in session.plan.steps(0, 2 * session.plan.steps_per_round):
            train_step(state, batches, step, log_due=False)
    profiler: Any = recording.profiler
    events = [event for event in profiler.kineto_results.events() if event.name() == "[memory]"]
    peak = now = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    peaks = session.collectives.all_gather(peak)
    if session.rank == 0:
        (directory / "peaks.json").write_text(json.dumps(peaks), encoding="utf-8")
    return Result("done")


if __name__ == "__main__":
    main()
