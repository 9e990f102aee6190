"""Measure the memory of tensors from the allocations that the profiler records."""

import gc
from collections.abc import Callable
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

    def two_steps() -> None:
        session = run.prepare(process)
        with run.settings(session.device):
            state = prepare(run, session, directory)
            batches = run.workload.batches(state.model, session.plan, 0, session.device)
            state.model.train()
            for step in session.plan.steps(0, 2):
                train_step(state, batches, step, log_due=False)

    with connected as process:
        return peak_of(two_steps)


def peak_of(work: Callable[..., object], *arguments: Any) -> int:
    """The peak memory of tensors, in bytes, while `work(*arguments)` runs in this process."""
    gc.collect()  # or the recording would contain releases of earlier allocations
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recording:
        work(*arguments)
    tree: Any = recording.profiler
    return _peak(tree.kineto_results.experimental_event_tree())


def _peak(events: list[Any]) -> int:
    """Return the largest sum of the bytes allocated in `events`, a tree, without the scratch memory of libraries.

    That is what an operation of torch allocates and releases before it returns: a convolution, for example, orders its
    weights as the instruction set of the CPU needs them.
    """
    changes: dict[tuple[int, int], int] = {}  # by time, and by number where two are at the same time
    unreleased: dict[int, tuple[tuple[int, int], int]] = {}  # by address: its key in `changes`, and the operation
    open_events = [(event, 0) for event in reversed(events)]
    while open_events:
        event, operation = open_events.pop()
        if event.name != "[memory]":
            inside = operation or (event.id if event.name.startswith("aten::") else 0)
            open_events += [(child, inside) for child in reversed(event.children)]
            continue
        address, size = event.extra_fields.ptr, event.extra_fields.alloc_size
        key = (event.start_time_ns, len(changes))
        allocated, allocated_in = unreleased.pop(address, (key, 0))
        if size < 0 and operation and allocated_in == operation:
            changes[allocated] = 0
            size = 0
        changes[key] = size
        if size > 0:
            unreleased[address] = (key, operation)
    return max(accumulate(changes[key] for key in sorted(changes)))
