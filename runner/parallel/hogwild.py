"""Processes that train one model in shared memory, without locks."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from runner.batching import MicroBatch
from runner.config import check
from runner.device import Device
from runner.optimizer import trainable
from runner.parallel.crew import LostError
from runner.parallel.processes import Processes
from runner.precision import Precision
from runner.workloads.base import Sums, Workload

if TYPE_CHECKING:
    from runner.run import Run

_ALIGNED = 64  # bytes: a tensor begins a cache line, so that no two workers fight for one at its border

_LEAD = 4
"""Updates that a worker may be ahead of another, so that all can stop after as many."""

_MEASURE_EVERY = 16
"""A worker's steps between two measurements of how far the model moved, which copy it."""


class Shared(NamedTuple):
    """What the workers share.

    Args:
        memory: uint8 [num_bytes], of the model's parameters and buffers.
        updates: int64 [num_workers]: how many each has made.
        asked: int64 [1]: whether one of them was asked to stop.
        last: int64 [1]: the update after which all stop; 0 while nobody was asked to.
    """

    memory: torch.Tensor
    updates: torch.Tensor
    asked: torch.Tensor
    last: torch.Tensor


@dataclass
class Hogwild(Processes):
    """Each process computes gradients of the model as it is, and writes its update over whatever the others wrote.

    Niu et al., HOGWILD!: A Lock-Free Approach to Parallelizing Stochastic Gradient Descent (2011). The processes take
    turns at the global batches, each with an optimizer of its own: so many steps as in every mode, but each from
    weights that others have moved meanwhile; no two runs are the same. One process is exactly `parallel=single`. They
    wait for each other where something is logged, evaluated or saved. A checkpoint holds the model, and the first
    process's moments for the other modes; each process's own are in its file. On the CPU of one machine.
    """

    @property
    def data_shard(self) -> tuple[int, int]:
        return (0, 1)

    @property
    def turn(self) -> tuple[int, int]:
        return (self.rank, self.world_size)

    @property
    def eval_shard(self) -> tuple[int, int]:
        return (self.rank, self.world_size)

    @property
    def incomparable(self) -> str:
        alone = self.world_size == 1
        return "" if alone else "they take turns without waiting for each other: no two runs are the same"

    def device(self, choice: Device) -> torch.device:
        why = "hogwild's processes share the host's memory"
        check(choice.kind in ("auto", "cpu"), "kind", choice.kind, why, "choose device=cpu, or parallel=ddp")
        return torch.device("cpu")

    def prepare(self, device: torch.device, run: Run) -> None:
        super().prepare(device, run)
        started = run.parallel.world_size if self._is_joined else 1
        why = f"torchrun or SLURM started {started} processes, which can share no memory"
        check(
            started == 1,
            "processes",
            self.processes,
            why,
            "leave torchrun or srun out: this mode starts its workers itself",
        )

    def common(self, run: Run) -> Shared:
        with torch.random.fork_rng(devices=[]):
            model = run.precision.convert(run.workload.build_model())
        num_bytes = sum(_padded(tensor) for tensor in _tensors(model))
        counts = (torch.zeros(length, dtype=torch.int64).share_memory_() for length in (self.world_size, 1, 1))
        return Shared(torch.zeros(num_bytes, dtype=torch.uint8).share_memory_(), *counts)

    def enter(self, place: Any, common: Shared, choice: Device) -> None:
        super().enter(place, common, choice)
        self.share(common)
        self._before: tuple[int, list[torch.Tensor] | None] | None = None
        self._staleness = [0.0] * 4  # sums and counts of: updates, distance

    def share(self, shared: Shared) -> None:
        """Count in the memory that all workers see."""
        self._memory = shared.memory
        # Every step reads them, and numpy is quick at it: views of the same memory.
        self._updates, self._asked, self._last = (counts.numpy() for counts in shared[1:])

    def place(self, model: torch.nn.Module, device: torch.device, run: Run) -> torch.nn.Module:
        model = super().place(model, device, run)
        start = 0
        for tensor in _tensors(model):  # all processes have made the same, and write the same
            piece = self._memory[start : start + tensor.nbytes].view(tensor.dtype)
            tensor.data = piece.as_strided(tensor.shape, tensor.stride()).copy_(tensor)
            start += _padded(tensor)
        self.barrier()
        return model

    def accumulate(
        self, model: torch.nn.Module, workload: Workload, batch: Any, precision: Precision, micro: MicroBatch
    ) -> torch.Tensor:
        if self._before is None:
            self._before = self._read(model)
        sums = super().accumulate(model, workload, batch, precision, micro)
        if micro.is_last:
            self._measure(model, *self._before)
            self._before = None
            self._updates[self.rank] += 1
        return sums

    def _read(self, model: torch.nn.Module) -> tuple[int, list[torch.Tensor] | None]:
        """What the model is like as a step begins: the number of updates so far, and now and then a copy."""
        measured = self.world_size > 1 and self._updates[self.rank] % _MEASURE_EVERY == 0
        return int(self._updates.sum()), [p.detach().clone() for p in trainable(model)] if measured else None

    def _measure(self, model: torch.nn.Module, updates: int, weights: list[torch.Tensor] | None) -> None:
        """Note how far the model has moved since `_read`, as this process is about to write."""
        staleness = self._staleness
        staleness[0] += int(self._updates.sum()) - updates
        staleness[1] += 1
        if weights is not None:
            moved = [p.detach() - before for p, before in zip(trainable(model), weights, strict=True)]
            distance = torch.nn.utils.get_total_norm(moved) / torch.nn.utils.get_total_norm(weights)
            staleness[2] += float(distance)
            staleness[3] += 1

    def evaluate(
        self, model: torch.nn.Module, workload: Workload, precision: Precision, device: torch.device
    ) -> tuple[dict[str, float], Sums]:
        self.barrier()  # the last update is written
        return super().evaluate(model, workload, precision, device)

    def agree(self, flag: bool) -> bool:
        """Rank 0 names the update after which all stop: as nobody is far ahead, all still have it before them."""
        own = int(self._updates[self.rank])
        if flag:  # only ever set: reading it to write it again could undo what another has just written
            self._asked[0] = 1
        if self.rank == 0 and self._asked[0] and not self._last[0]:
            self._last[0] = own + _LEAD + 1  # whoever comes so far has waited for an update of rank 0 after this line
        self._wait_for(own - _LEAD)
        return bool(self._last[0] == own)

    def _wait_for(self, num_updates: int) -> None:
        """Let each of the others make `num_updates`."""
        until = time.monotonic() + self.timeout
        while self._updates.min() < num_updates:
            if time.monotonic() > until:
                raise LostError(f"rank {self._updates.argmin()} did not come within {self.timeout:g} s")
            time.sleep(0.0002)

    def scalars(self) -> dict[str, float]:
        """All updates; how many of others, and how far by its norm, moved the model between a read and its write."""
        total = self.reduce({"staleness": torch.tensor(self._staleness, dtype=torch.float64)})["staleness"]
        self._staleness = [0.0] * 4
        updates, steps, distance, measured = total.tolist()
        return {
            "hogwild/updates": steps,
            "hogwild/staleness": updates / max(1.0, steps),
            "hogwild/distance": distance / max(1.0, measured),
        }

    def local_state(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        moments = self._state_on_cpu(model, optimizer, kept=True)[1]
        return {"moments": moments, "staleness": torch.tensor(self._staleness, dtype=torch.float64)}

    def load_full_state(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, tensors: Sums, moments: dict[str, Any]
    ) -> None:
        super().load_full_state(model, optimizer, tensors, moments)
        self.barrier()  # nobody trains while another still loads

    def load_local_state(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        if "staleness" in state:
            self._load_moments(model, optimizer, state["moments"])
            self._staleness = state["staleness"].tolist()


def _tensors(model: torch.nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


def _padded(tensor: torch.Tensor) -> int:
    """The bytes that `tensor` takes, up to where the next may begin."""
    return -(-tensor.nbytes // _ALIGNED) * _ALIGNED
