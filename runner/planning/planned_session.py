"""Creates the session of rank 0 of a run that is only planned. The run may be planned for another machine.

No process is started.
"""

from __future__ import annotations

import torch

from runner.batching import Plan
from runner.config.errors import check
from runner.parallel.base import Parallel
from runner.parallel.collectives import Collectives
from runner.parallel.launch.processes import LocalProcesses
from runner.run import Run
from runner.session import Session


def prepared(run: Run, num_devices: int | None = None) -> Session:
    """Return the session of rank 0, after all checks; no other process is started.

    Args:
        run: the run.
        num_devices: number of devices that the run is assumed to have; None for those of this machine.

    Raises:
        ConfigError: if the run is refused.
    """
    return run.prepare(first_process(run, num_devices))


def first_process(run: Run, num_devices: int | None = None) -> Collectives:
    """Return rank 0 as the launcher of the run would give it; no process is started.

    Args:
        run: the run.
        num_devices: number of devices to plan for, each represented by the CPU; None for the devices of this machine.

    Raises:
        ConfigError: if the devices or processes do not fit the parallel mode.
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
