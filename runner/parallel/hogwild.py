"""Processes that train one model in shared memory, without locks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from runner.batching import MicroBatch
from runner.config import check
from runner.device import Device
from runner.optimizer import trainable
from runner.parallel.processes import Processes
from runner.precision import Precision
from runner.workloads.base import Sums, Workload

if TYPE_CHECKING:
    from runner.run import Run

_ALIGNED = 64  # bytes: a tensor begins a cache line, so that no two workers fight for one at its border

_MEET_EVERY = 8
"""Rounds between two points at which the workers wait for each other, to stop together if one was asked to."""

_MEASURE_EVERY = 16
"""A worker's steps between two measurements of how far the model moved, which copy it."""


class Shared(NamedTuple):
    """What the workers share.

    Args:
        memory: uint8 [num_bytes], of the model's parameters and buffers.
        updates: int64 [num_workers]: how many each has made.
    """

    memory: torch.Tensor
    updates: torch.Tensor


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
        return Shared(
            torch.zeros(num_bytes, dtype=torch.uint8).share_memory_(),
            torch.zeros(self.world_size, dtype=torch.int64).share_memory_(),
        )

    def enter(self, place: Any, common: Shared, choice: Device) -> None:
        super().enter(place, common, choice)
        self._shared = common
        self._rounds, self._asked = 0, False
        self._before: tuple[int, list[torch.Tensor] | None] | None = None
        self._staleness = torch.zeros(4, dtype=torch.float64)  # sums and counts of: updates, distance

    def place(self, model: torch.nn.Module, device: torch.device, run: Run) -> torch.nn.Module:
        model = super().place(model, device, run)
        start = 0
        for tensor in _tensors(model):  # all processes have made the same, and write the same
            piece = self._shared.memory[start : start + tensor.nbytes].view(tensor.dtype)
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
            self._shared.updates[self.rank] += 1
        return sums

    def _read(self, model: torch.nn.Module) -> tuple[int, list[torch.Tensor] | None]:
        """What the model is like as a step begins: the number of updates so far, and now and then a copy."""
        updates = self._shared.updates
        measured = self.world_size > 1 and int(updates[self.rank]) % _MEASURE_EVERY == 0
        return int(updates.sum()), [p.detach().clone() for p in trainable(model)] if measured else None

    def _measure(self, model: torch.nn.Module, updates: int, weights: list[torch.Tensor] | None) -> None:
        """Note how far the model has moved since `_read`, as this process is about to write."""
        self._staleness[:2] += torch.tensor([float(self._shared.updates.sum() - updates), 1.0])
        if weights is not None:
            moved = [p.detach() - before for p, before in zip(trainable(model), weights, strict=True)]
            distance = torch.nn.utils.get_total_norm(moved) / torch.nn.utils.get_total_norm(weights)
            self._staleness[2:] += torch.tensor([float(distance), 1.0])

    def evaluate(
        self, model: torch.nn.Module, workload: Workload, precision: Precision, device: torch.device
    ) -> tuple[dict[str, float], Sums]:
        self.barrier()  # the last update is written
        return super().evaluate(model, workload, precision, device)

    def agree(self, flag: bool) -> bool:
        self._rounds, self._asked = self._rounds + 1, self._asked or flag
        if self._rounds % _MEET_EVERY:
            return False
        return bool(self.reduce({"asked": torch.tensor(float(self._asked))})["asked"])

    def scalars(self) -> dict[str, float]:
        """All updates; how many of others, and how far by its norm, moved the model between a read and its write."""
        staleness = self.reduce({"staleness": self._staleness})["staleness"].tolist()
        self._staleness.zero_()
        updates, steps, distance, measured = staleness
        return {
            "hogwild/updates": steps,
            "hogwild/staleness": updates / max(1.0, steps),
            "hogwild/distance": distance / max(1.0, measured),
        }

    def local_state(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        moments = self._state_on_cpu(model, optimizer, kept=True)[1]
        return {"moments": moments, "staleness": self._staleness.clone()}

    def load_full_state(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, tensors: Sums, moments: dict[str, Any]
    ) -> None:
        super().load_full_state(model, optimizer, tensors, moments)
        self.barrier()  # nobody trains while another still loads

    def load_local_state(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        if "staleness" in state:
            self._load_moments(model, optimizer, state["moments"])
            self._staleness.copy_(state["staleness"])


def _tensors(model: torch.nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


def _padded(tensor: torch.Tensor) -> int:
    """The bytes that `tensor` takes, up to where the next may begin."""
    return -(-tensor.nbytes // _ALIGNED) * _ALIGNED
