"""`parallel=hogwild`: processes that train one model in shared memory, without locks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch

from runner.batching import MicroBatch, Plan
from runner.config.errors import check, errors_under
from runner.device import Device
from runner.parallel import full_state
from runner.parallel.collectives import ProcessGroup
from runner.parallel.full_state import TensorDict
from runner.parallel.launch.processes import Launcher, LocalProcesses
from runner.parallel.launch.supervisor import LostError
from runner.parallel.multiprocess import MultiProcess
from runner.parallel.session import Session
from runner.storage.value_checks import check_like

_CACHE_LINE = 64  # bytes; each tensor starts on a new cache line, so that neighboring tensors never share one
_MAX_LEAD = 4  # updates by which a worker may be ahead of another, so that all can stop after the same number


class SharedState(NamedTuple):
    """The shared memory of the workers: of the model's parameters and buffers, and int64 counts."""

    memory: torch.Tensor  # uint8 [num_bytes]
    updates: torch.Tensor  # [num_workers]; an update is counted just before it is made
    stop_requested: torch.Tensor  # [1]: 1 if any worker was asked to stop
    last_update: torch.Tensor  # [1]: the number of updates before each worker stops; 0 until rank 0 has chosen it


class SharedMemoryCollectives(ProcessGroup):
    """Collectives of a process group, except that `any_rank`, which the loop calls after every step, does not wait."""

    def __init__(self, devices: Sequence[torch.device], timeout: float, shared_state: SharedState):
        super().__init__(devices, timeout)
        self.memory = shared_state.memory
        # NumPy views of the same memory: they are read in every step, which is faster than reading tensors.
        self.updates, self._stop_requested, self._last_update = (counts.numpy() for counts in shared_state[1:])

    def any_rank(self, flag: bool) -> bool:
        """Return whether this worker has to stop now, after its latest update; `flag` requests that all workers stop.

        Rank 0 then chooses the number of updates after which every worker stops, one that no worker has passed.
        Therefore, a worker waits here until it is at most `_MAX_LEAD` updates ahead of the slowest worker. It raises a
        `LostError` after `timeout` seconds.
        """
        updates = int(self.updates[self.rank])
        if flag:  # set, never cleared: a read-modify-write could undo the write of another worker
            self._stop_requested[0] = 1
        if self.rank == 0 and self._stop_requested[0] and not self._last_update[0]:
            # A worker that reaches this number has waited for rank 0's next update, so it sees the number in time.
            self._last_update[0] = updates + _MAX_LEAD + 1
        waited, since = 0.0, time.monotonic()
        while self.updates.min() < updates - _MAX_LEAD:
            if waited > self.timeout:
                raise LostError(f"rank {self.updates.argmin()} made no update for {self.timeout:g} s")
            time.sleep(0.0002)
            now = time.monotonic()
            waited, since = waited + min(now - since, 0.5), now  # capped: all workers may have been suspended together
        return bool(self._last_update[0] == updates)


@dataclass
class Hogwild(MultiProcess):
    """Lock-free training: each worker computes gradients of a shared model and updates the model without locks.

    Niu et al., HOGWILD!: A Lock-Free Approach to Parallelizing Stochastic Gradient Descent (2011). The workers divide
    the global batches among themselves, and wait for each other before logging, evaluating or saving. With only one
    worker, the results are exactly those of `parallel=single`. A checkpoint holds the optimizer state of worker 0, from
    which other modes can resume, and that of each worker in the file of its rank (`rank_0.pt`, …).
    """

    description: ClassVar[str] = "Hogwild"
    difference: ClassVar[str] = "the workers do not wait for each other: no two runs are the same"

    collectives_class: ClassVar[type[ProcessGroup]] = SharedMemoryCollectives

    def launcher(self, choice: Device) -> Launcher:
        why = "hogwild's processes share host memory"
        check(choice.kind in ("auto", "cpu"), "device.kind", choice.kind, why, "choose device=cpu, or parallel=ddp")
        with errors_under("device"):
            choice = replace(choice, kind="cpu")  # which has no index
        self._devices(choice)  # of this one process, which starts the workers: others could share no memory
        return LocalProcesses([torch.device("cpu")] * self._num_processes(0), self)

    def divide(self, session: Session) -> Plan:
        shard = (session.rank, session.world_size)
        return replace(session.plan, step_shard=shard, eval_shard=shard, rng_stream=session.rank)

    def allocate_shared_state(self, session: Session) -> SharedState:
        with torch.random.fork_rng(devices=[]):
            model = session.precision.convert(session.workload.build_model())
        num_bytes = sum(_padded_bytes(tensor) for tensor in _tensors(model))
        counts = (torch.zeros(length, dtype=torch.int64).share_memory_() for length in (session.world_size, 1, 1))
        return SharedState(torch.zeros(num_bytes, dtype=torch.uint8).share_memory_(), *counts)

    def _place(self, model: torch.nn.Module, session: Session) -> torch.nn.Module:
        assert isinstance(session.collectives, SharedMemoryCollectives)
        self._updates = session.collectives.updates
        self._updates_before: int | None = None  # those of all workers, at the start of a step
        self._staleness = [0, 0]  # updates by others during the steps of this worker, and the number of its steps
        model = super()._place(model, session)
        start = 0
        for tensor in _tensors(model):  # all workers have initialized the same model, and write the same values
            part = session.collectives.memory[start : start + tensor.nbytes].view(tensor.dtype)
            tensor.data = part.as_strided(tensor.shape, tensor.stride()).copy_(tensor)
            start += _padded_bytes(tensor)
        session.collectives.barrier()
        return model

    @contextmanager
    def measured(self, micro: MicroBatch) -> Iterator[None]:
        if self._updates_before is None:
            self._updates_before = int(self._updates.sum())
        yield
        if micro.is_last:
            self._staleness[0] += int(self._updates.sum()) - self._updates_before
            self._staleness[1] += 1
            self._updates_before = None
            self._updates[self._session.rank] += 1

    def scalars(self) -> dict[str, float]:
        total = self._session.collectives.all_reduce({"staleness": torch.tensor(self._staleness)})["staleness"]
        self._staleness = [0, 0]
        updates, steps = total.tolist()
        return {"hogwild/updates": steps, "hogwild/staleness": updates / max(1, steps)}

    def load_full_state(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, tensors: TensorDict, states: dict[str, Any]
    ) -> None:
        super().load_full_state(model, optimizer, tensors, states)
        self._session.collectives.barrier()  # no worker may train while another still loads

    def local_state(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        optimizer_state = full_state.collect(model, optimizer, keep=True)[1]
        return {"moments": optimizer_state, "window": torch.tensor(self._staleness)}

    def load_local_state(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        if "window" in state:
            check_like(state, {"moments": dict, "window": torch.zeros(2, dtype=torch.int64)}, "worker")
            full_state.load_optimizer(model, optimizer, state["moments"])
            self._staleness = state["window"].tolist()


def _tensors(model: torch.nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


def _padded_bytes(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // _CACHE_LINE) * _CACHE_LINE
