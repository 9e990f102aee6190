"""The base class of engines whose jobs may run on other machines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from runner.config.errors import check, check_range
from runner.sweep.engines.base import Demand, Engine


class Resources(NamedTuple):
    """The numbers of cores and GPUs to request for a job, and the number of CPU threads of each of its processes."""

    cores: int
    gpus: int
    threads: int


@dataclass
class ClusterEngine(Engine):
    """An engine whose jobs may run on other machines. It requests a core for each thread of each process."""

    threads: int = 1
    gpus: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "threads", least=1, most=1024)
        check_range(self, "gpus", least=0, most=1024)

    def demand_elsewhere(self, threads: int | None) -> Demand | None:
        why = "this machine does not have the devices of the jobs, so it is not known how many GPUs each needs"
        check(self.gpus is not None, "sweep.gpus", None, why, "for example sweep.gpus=1")
        return Demand(1, self.gpus or 0, threads)

    def resources(self, demand: Demand) -> Resources:
        """Return the resources to request for a job, with enough cores for at least one process per GPU."""
        gpus = demand.gpus if self.gpus is None else self.gpus
        threads = demand.threads or self.threads
        return Resources(max(demand.processes, gpus) * threads, gpus, threads)
