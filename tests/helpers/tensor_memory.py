"""Measure the memory of tensors from the allocations that the profiler records."""

import gc
from contextlib import nullcontext
from itertools import accumulate
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from runner.parallel.collectives import Collectives
from runner.run import build_run
from runner.training import prepare, train_step


def measured_peak(config: dict[str, Any], directory: Path, process: Collectives | None = None) -> int:
    """The peak memory of tensors, in bytes, during the first two steps of the run of `config` on this rank."""
    run = build_run(config)
    connected = nullcontext(process) if process else run.parallel.launcher(run.device).connect()
    gc.collect()  # or the recording would contain releases of earlier allocations
    with connected as process, profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recording:
        session = run.prepare(process)
        with run.settings(session.device):
            state = prepare(run, session, directory)
            batches = run.workload.batches(state.model, session.plan, 0, session.device)
            state.model.train()
            for step in session.plan.steps(0, 2):
                train_step(state, batches, step, log_due=False)
    results: Any = recording.profiler
    events = [event for event in results.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))
