"""Measure the memory of tensors from the allocations that the profiler records."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from runner.parallel.collectives import Collectives
from runner.run import build_run
from runner.training import prepare, train_step


@contextmanager
def record_allocations() -> Iterator[list[int]]:
    """A context; at its end, the list holds the sizes of all allocations and the negative sizes of all releases."""
    sizes: list[int] = []
    gc.collect()  # or this recording would contain releases of earlier allocations
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recording:
        yield sizes
    results: Any = recording.profiler
    events = [event for event in results.kineto_results.events() if event.name() == "[memory]"]
    sizes += [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]


def peak_allocated_bytes(sizes: list[int]) -> int:
    """The largest number of bytes that were allocated at the same time."""
    most = now = 0
    for size in sizes:
        now += size
        most = max(most, now)
    return most


def measured_peak(config: dict[str, Any], directory: Path, process: Collectives | None = None) -> int:
    """The peak memory of tensors, in bytes, during the first two steps of the run of `config` on this rank."""
    run = build_run(config)
    connected = nullcontext(process) if process else run.parallel.launcher(run.device).connect()
    with connected as process, record_allocations() as sizes:
        session = run.prepare(process)
        with run.settings(session.device):
            state = prepare(run, session, directory)
            batches = run.workload.batches(state.model, session.plan, 0, session.device)
            state.model.train()
            for step in session.plan.steps(0, 2):
                train_step(state, batches, step, log_due=False)
    return peak_allocated_bytes(sizes)
