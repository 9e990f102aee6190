"""The session of a run that is planned: on this machine or on another one, without its other processes."""

from __future__ import annotations

import dataclasses

import torch

from runner.config.errors import check
from runner.parallel.base import Parallel
from runner.parallel.collectives import Collectives
from runner.parallel.context import Layout, Process
from runner.parallel.launch.cluster import RankInfo
from runner.parallel.launch.processes import LocalProcesses
from runner.run import Run, Session


def prepared(run: Run, num_devices: int | None) -> Session:
    """Return the session of rank 0, after all checks; no other process is started.

    Args:
        run: the run.
        num_devices: number of devices that the run is assumed to have; None for those of this machine.

    Raises:
        ConfigError: if the run is refused.
    """
    if num_devices is None:
        launcher = run.parallel.launcher(run.device)
        devices, in_processes = launcher.devices, isinstance(launcher, LocalProcesses)
    else:
        if type(run.parallel) is Parallel:
            num_devices = 1  # the others are not used
        processes = getattr(run.parallel, "processes", None)
        in_processes = processes is not None and getattr(run.parallel, "engine", "processes") == "processes"
        if in_processes and processes == "auto":
            run = dataclasses.replace(run, parallel=dataclasses.replace(run.parallel, processes=num_devices))
        asked = getattr(run.parallel, "processes", num_devices) if in_processes else num_devices
        why = f"there are {num_devices} devices, and each process needs its own"
        check(asked <= num_devices, "parallel.processes", asked, why, f"--devices {asked}, or fewer processes")
        devices = [torch.device("cpu")] * asked
    world_size = len(devices) if in_processes else 1
    own = devices[:1] if in_processes else devices
    return run.prepare(Process(RankInfo(0, world_size, 0, world_size), own, Collectives()))


def layout_of(session: Session, rank: int) -> Layout:
    """Return the share of the work that `rank` does."""
    world_size = session.context.world_size
    return session.run.parallel.layout(RankInfo(rank, world_size, rank, world_size))
