"""A process of a run that is only planned, perhaps for another machine, and the memory that its devices have.

No process is started.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from runner.batching import Plan
from runner.config.errors import check
from runner.parallel.base import Parallel
from runner.parallel.collectives import Collectives
from runner.parallel.launch.processes import LocalProcesses
from runner.parallel.session import Session
from runner.run import Run
from runner.system.accelerator import total_bytes
from runner.system.memory import host_memory

_PROCESS_BYTES = 0.4e9
"""Bytes that a process takes in addition to its tensors."""

_USABLE = 0.95
"""The fraction of a GPU's memory that the CUDA context and fragmentation leave for tensors."""


def prepared(run: Run, num_devices: int | None = None) -> Session:
    """Return the session of `first_process`, after all checks; a ConfigError if the run is refused."""
    return run.prepare(first_process(run, num_devices))


def first_process(run: Run, num_devices: int | None = None) -> Collectives:
    """Return rank 0 as the launcher of the run would give it; no process is started.

    `num_devices` is the number of devices to plan for, each represented by the CPU; None for those of this machine.
    """
    parallel = run.parallel
    if num_devices is None:
        launcher = parallel.launcher(run.device)
        devices, in_processes = launcher.devices, isinstance(launcher, LocalProcesses)
    else:
        if type(parallel) is Parallel:
            num_devices = 1  # the others are not used
        processes, in_processes = getattr(parallel, "processes", None), getattr(parallel, "in_processes", False)
        asked = processes if in_processes and isinstance(processes, int) else num_devices
        why = f"there are {num_devices} devices, and each process needs its own"
        check(asked <= num_devices, "parallel.processes", asked, why, f"--devices {asked}, or fewer processes")
        devices = [torch.device("cpu")] * asked
    world_size = len(devices) if in_processes else 1
    return Collectives(devices[:1] if in_processes else devices, 0, world_size)


def plan_of(run: Run, session: Session, rank: int) -> Plan:
    """Return the share of the work that `rank` of the run does, given the session of any rank."""
    return run.session(Collectives(session.devices, rank, session.world_size)).plan


def available_bytes(process: Collectives) -> float:
    """Return the bytes that all processes of a run may use, given any: a part of its GPUs, or available host memory."""
    device = process.devices[0]
    if device.type not in ("cpu", "mps"):
        count = max(process.world_size, len(process.devices))
        return _USABLE * total_bytes(device) * count
    return host_memory()["available_bytes"] or 0


def needed_bytes(device: torch.device, peaks: Sequence[int]) -> float:
    """Return the predicted memory in bytes of all processes of a run together, to compare it with `available_bytes`.

    On GPUs, it is the largest of the `peaks` of tensors times the number of ranks, as one rank cannot use the
    free memory of another. Otherwise, it is the sum of the peaks, plus what each process takes besides tensors.
    """
    if device.type not in ("cpu", "mps"):
        return max(peaks) * len(peaks)
    return sum(peaks) + _PROCESS_BYTES * len(peaks)
