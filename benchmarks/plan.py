"""Compares plans with measurements: the peak memory of tensors on each rank, with one thread per process on a CPU.

`python -m benchmarks.plan [CASE]…`: the profiler records the allocations of the first two steps. With fsdp on gloo,
whose threads release copies of gradients at varying times, the result varies.
"""

import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.measure import write
from runner.api.composing import compose
from runner.parallel.collectives import Collectives
from runner.result import Result
from runner.run import build_run
from runner.training import prepare, train_step

GOAL = 0.10
RESNET50 = ("workload=resnet50", "batch_size=32", "data.num_samples=128")
RESNET18 = ("model=resnet18", "data=synthetic", "data.size=64", "data.num_samples=256", "batch_size=64")
CUT = ("parallel=pipeline", "parallel.cuts=[layer3.1]")
CASES: dict[str, tuple[str, ...]] = {
    "convnet": ("model=convnet", "batch_size=256"),
    "dqn": ("workload=dqn", "workload.env_steps=2000"),
    "resnet18": RESNET18,
    "resnet50": RESNET50,
    "resnet50, accumulation 4": (*RESNET50, "accumulation=4"),
    "resnet50, recomputed": (*RESNET50, "model.checkpoint_activations=true"),
    "resnet50, bf16": (*RESNET50, "precision=bf16"),
    "resnet50, ddp × 2": (*RESNET50, "parallel=ddp"),
    "resnet50, fsdp × 2": (*RESNET50, "parallel=fsdp"),
    "resnet50, pipeline × 2": (*RESNET50, *CUT),
    "resnet50, pipeline × 2, 1f1b": (*RESNET50, *CUT, "parallel.schedule=1f1b", "parallel.num_micro_batches=16"),
}
COMMON = ("device=cpu", "device.threads=1", "steps=2")


def main() -> None:
    """Plan and measure the cases, and write a table."""
    if sys.argv[1:2] == ["--run"]:
        from benchmarks.plan import measured  # other ranks import its functions by name, and cannot import `__main__`

        print(json.dumps(measured(sys.argv[2])))
        return
    rows = []
    for name in sys.argv[1:] or CASES:
        plan = output("runner", "plan", *CASES[name], *COMMON, "--json")
        predicted = [rank["peak_bytes"] for rank in plan["ranks"]]
        peaks = output("benchmarks.plan", "--run", name)
        error = max((one / other - 1 for one, other in zip(predicted, peaks, strict=True)), key=abs)
        verdict = "reached" if abs(error) <= GOAL else "MISSED"
        print(f"  {name:<32} {[f'{each / 1e6:,.1f} MB' for each in predicted]}: {error:+.1%} {verdict}", flush=True)
        rows.append({"case": name, "predicted": predicted, "measured": peaks, "error": error})
    write("plan", [{"title": "peak memory of tensors in bytes", "rows": rows}], sys.argv[1:])


def output(module: str, *words: str) -> Any:
    """Return the JSON that a module prints last."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-m", module, *words], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout if module == "runner" else done.stdout.splitlines()[-1])


def measured(name: str) -> list[int]:
    """Train two steps of the case `name`, and return the measured peak of each rank."""
    run = build_run(dict(compose([*CASES[name], *COMMON])))
    launcher = run.parallel.launcher(run.device)
    with tempfile.TemporaryDirectory() as scratch, launcher.connect() as process:
        rank_main = partial(measure_rank, run.config, Path(scratch))
        launcher.launch(partial(rank_main, process), rank_main, run.prepare(process), Path(scratch))
        return json.loads(Path(scratch, "peaks.json").read_text(encoding="utf-8"))


def measure_rank(config: dict[str, Any], directory: Path, process: Collectives) -> Result:
    """Train two steps of a run in `process`; rank 0 writes the peak memory of tensors of each rank to `peaks.json`."""
    torch.set_num_threads(1)
    run = build_run(config)
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
