"""The base class of parallel modes with several processes, each of which has one device."""

from __future__ import annotations

import logging
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch

from runner.batching import Plan
from runner.config.errors import ConfigError, check, errors_under
from runner.config.limits import Range
from runner.device import Device
from runner.parallel.base import Parallel
from runner.parallel.collectives import ProcessGroup
from runner.parallel.launch.cluster import external_rank_info
from runner.parallel.launch.processes import ExternalProcesses, Launcher, LocalProcesses
from runner.parallel.session import Session

log = logging.getLogger(__name__)


@dataclass
class MultiProcess(Parallel, ABC):
    """The base class of modes with several processes; `conf/parallel/_processes.yaml` explains the options."""

    processes: Annotated[int, Range(least=1, most=4096)] | Literal["auto"] = "auto"
    timeout: Annotated[float, Range(least=1, most=86_400)] = 300.0
    max_restarts: Annotated[int, Range(least=0, most=1000)] = 0

    collectives_class: ClassVar[type[ProcessGroup]] = ProcessGroup

    @property
    def in_processes(self) -> bool:
        """Whether the mode trains in several processes with its present options."""
        return True

    @abstractmethod
    def divide(self, session: Session) -> Plan: ...

    def launcher(self, choice: Device) -> Launcher:
        rank_info = external_rank_info()
        if rank_info is None:
            gpus = self._gpus(choice)
            count = self._num_processes(len(gpus))
            if gpus and count > len(gpus):
                why = f"{len(gpus)} GPUs may be used, and each process needs its own"
                raise ConfigError("parallel.processes", count, why, f"at most {len(gpus)}, or device=cpu")
            return LocalProcesses(gpus[:count] or [torch.device("cpu")] * count, self)
        if self.processes not in ("auto", rank_info.world_size):
            why = f"torchrun or SLURM started {rank_info.world_size} processes"
            raise ConfigError("parallel.processes", self.processes, why, "leave it auto")
        if self.max_restarts and rank_info.rank == 0:
            log.warning("parallel.max_restarts has no effect: torchrun (--max-restarts) or SLURM restarts processes")
        device, refusal = torch.device("cpu"), None
        try:
            device = self._device_of_rank(choice, rank_info.local_rank)
        except ConfigError as error:  # only here, perhaps: `connect` tells the other ranks
            why = f"rank {rank_info.rank}, on {socket.gethostname()}: {error.why}"
            refusal = ConfigError(error.key, error.got, why, error.remedy)
        return ExternalProcesses(rank_info, device, self, refusal)

    def _device_of_rank(self, choice: Device, local_rank: int) -> torch.device:
        gpus = self._gpus(choice)
        if not gpus:
            return torch.device("cpu")
        if torch.accelerator.device_count() == 1:
            return gpus[0]
        why = f"process {local_rank} of this machine has no GPU of its own"
        fewer = f"start at most {len(gpus)} processes a machine"
        check(local_rank < len(gpus), "device.indices", [gpu.index for gpu in gpus], why, fewer)
        return gpus[local_rank]

    def _gpus(self, choice: Device) -> list[torch.device]:
        """Return the GPUs of this machine that the processes may use; an empty list if the processes run on the CPU."""
        kind = choice.resolved_kind()
        if kind == "mps" and choice.kind == "auto":  # processes cannot share the one device, but nobody asked for it
            return []
        why = "the processes would share one device" if kind == "mps" else ""
        try:
            torch.distributed.get_default_backend_for_device(kind)
        except ValueError:
            why = "torch.distributed has no backend for its tensors"
        check(not why, "device.kind", kind, why, "choose device=cpu, or parallel=single")
        with errors_under("device"):
            return [device for device in choice.resolve_all() if device.type != "cpu"]

    def _num_processes(self, num_gpus: int) -> int:
        return self.processes if isinstance(self.processes, int) else num_gpus or 2

    def allocate_shared_state(self, session: Session) -> Any:
        """Allocate and return memory that all processes of this machine share; return None if the mode needs none."""
        return None


class Within(torch.nn.Module):
    """A network as the module that a mode wraps: a call computes a function of the network, such as its loss.

    The network may be called several times in it, and so may its submodules, of which a wrapper would not know.
    """

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.model = model

    def forward(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(self.model, *arguments)


def finds_unused(choice: bool | str, model: torch.nn.Module) -> bool:
    """Return whether a mode looks for parameters that a step does not use: `auto` trusts this project's networks."""
    return bool(choice) if choice != "auto" else not type(model).__module__.startswith("runner.")
