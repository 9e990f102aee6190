"""What the processes of a run tell each other; the base is a run of one process, for which there is nothing to do.

https://docs.pytorch.org/docs/stable/distributed.html#collective-functions
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch

from runner.tracking.metrics import MetricSums

T = TypeVar("T")


class Collectives:
    """One process: every collective is the identity. Those of several processes must be called on all of them."""

    rank = 0
    world_size = 1

    def all_reduce(self, sums: MetricSums) -> MetricSums:
        """Add up sums over all ranks, tensor by tensor: as sums and counts, ragged shards stay exact."""
        return sums

    def local_share(self, total: torch.Tensor) -> torch.Tensor:
        """This rank's share of a total that `all_reduce` gave: the shares of all ranks give it again."""
        return total

    def all_reduce_max(self, tensor: torch.Tensor) -> None:
        """Set `tensor` to its elementwise maximum over all ranks, in place."""

    def all_reduce_mean(self, tensor: torch.Tensor) -> None:
        """Set `tensor` to its mean over all ranks, in place; in float64, so that equal values stay as they are."""

    def any_rank(self, flag: bool) -> bool:
        """Whether any rank has raised `flag`, the same answer on all of them; it may come a call later."""
        return flag

    def barrier(self) -> None:
        """Wait until every rank is here."""

    def from_rank_0(self, make: Callable[[], T]) -> T:
        """What `make()` returns or raises on rank 0, on every rank."""
        return make()

    def all_gather(self, value: Any) -> list[Any]:
        """The picklable values of all ranks, in the order of the ranks."""
        return [value]

    def gather_to_rank0(self, tensors: dict[Any, Any]) -> dict[Any, Any]:
        """The tensors of all ranks by name on rank 0; nothing on the others. Of equal names, the lowest rank's.

        Args:
            tensors: this rank's tensors, on the CPU, and plain values.
        """
        return tensors

    def finish(self) -> None:
        """Wait for what is still on its way."""


class _TensorSpec(NamedTuple):
    """The shape and the format of a tensor that another rank has."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(value: Any) -> Any:
        """The spec of a tensor; any other value as it is."""
        return _TensorSpec(tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else value


class ProcessGroup(Collectives):
    """Several processes, over the default process group of `torch.distributed`.

    Args:
        timeout: seconds that anybody waits for the others.
        shared_state: what the launcher allocated for all processes of one machine.
    """

    def __init__(self, timeout: float, shared_state: Any = None):
        self.rank, self.world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self.timeout = timeout
        self._question: tuple[torch.Tensor, Any] | None = None

    def all_reduce(self, sums: MetricSums) -> MetricSums:
        totals = {name: tensor.clone() for name, tensor in sums.items()}
        for total in totals.values():
            torch.distributed.all_reduce(total)
        return totals

    def local_share(self, total: torch.Tensor) -> torch.Tensor:
        return total if self.rank == 0 else torch.zeros_like(total)

    def all_reduce_max(self, tensor: torch.Tensor) -> None:
        torch.distributed.all_reduce(tensor, torch.distributed.ReduceOp.MAX)

    def all_reduce_mean(self, tensor: torch.Tensor) -> None:
        total = tensor.double()
        torch.distributed.all_reduce(total)
        tensor.copy_(total / self.world_size)

    def any_rank(self, flag: bool) -> bool:
        """The answer to the question before this one: it travels while a step computes, and holds none up."""
        ours = torch.tensor(int(flag))
        asked = torch.distributed.all_reduce(ours, torch.distributed.ReduceOp.MAX, async_op=True)
        (answer, answered), self._question = self._question or (torch.tensor(0), None), (ours, asked)
        if answered is not None:
            answered.wait()
        return bool(answer)

    def barrier(self) -> None:
        torch.distributed.all_reduce(torch.zeros(()))  # over gloo, whatever the device

    def from_rank_0(self, make: Callable[[], T]) -> T:
        outcome: list[Any] = [None, None]
        if self.rank == 0:
            try:
                outcome[0] = make()
            except Exception as error:
                outcome[1] = error
        torch.distributed.broadcast_object_list(outcome)
        if outcome[1] is not None:
            raise outcome[1]
        return outcome[0]

    def all_gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.world_size
        torch.distributed.all_gather_object(values, value)
        return values

    def gather_to_rank0(self, tensors: dict[Any, Any]) -> dict[Any, Any]:
        described = {name: _TensorSpec.of(value) for name, value in tensors.items()}
        gathered: dict[Any, Any] = {}
        for source, values in enumerate(self.all_gather(described)):
            for name in [name for name in values if name not in gathered]:
                gathered[name] = value = values[name]
                if not isinstance(value, _TensorSpec):
                    continue
                if self.rank == source:
                    gathered[name] = tensors[name]
                    if source > 0:
                        torch.distributed.send(tensors[name].contiguous(), 0)
                elif self.rank == 0:
                    gathered[name] = torch.empty(value.shape, dtype=value.dtype)
                    torch.distributed.recv(gathered[name], source)
        return gathered if self.rank == 0 else {}

    def finish(self) -> None:
        if self._question is not None:
            self._question[1].wait()
            self._question = None

    def forget(self) -> None:
        """Drop what is still on its way: its answer will not come."""
        self._question = None
