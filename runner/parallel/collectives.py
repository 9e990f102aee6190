"""Collective operations of the processes of a run; in the base class, which is for a single process, they are no-ops.

https://docs.pytorch.org/docs/stable/distributed.html#collective-functions
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import torch

from runner.config.errors import ConfigError
from runner.parallel.json_encoding import decode, encode
from runner.parallel.launch.supervisor import LostError
from runner.tracking.metrics import MetricSums

_MOST_BYTES = 2**30
"""Size limit of a message, which is a config, measurements, or one sample, but never a model."""

T = TypeVar("T")


class Collectives:
    """The collectives of a single process. In subclasses for several processes, all ranks must make the same calls."""

    rank = 0
    world_size = 1
    timeout = math.inf
    """Seconds that a rank waits for the others."""

    def all_reduce(self, sums: MetricSums) -> MetricSums:
        """Return a dict with the sum over all ranks of each tensor in the dict `sums`.

        Metrics are passed as sums and counts, so that the means are exact even if the ranks have unequal shards.
        """
        return sums

    def local_share(self, total: torch.Tensor) -> torch.Tensor:
        """Return the tensor that this rank has to pass to `all_reduce` so that the result is `total`.

        Used to restore sums that were saved after an all-reduce. `total` must be the same on all ranks.
        """
        return total

    def all_reduce_max(self, tensor: torch.Tensor) -> None:
        """Set `tensor` to its elementwise maximum over all ranks, in place."""

    def all_reduce_mean(self, tensor: torch.Tensor) -> None:
        """Set `tensor` to its elementwise mean over all ranks, in place.

        The mean is computed in float64, so that a value that is the same on all ranks does not change.
        """

    def any_rank(self, flag: bool) -> bool:
        """Return whether `flag` is true on any rank. The result is the same on all ranks.

        To avoid waiting for other ranks, a subclass may report a true `flag` late: not in this call, but in a later
        one. A `flag` that is true only in the last calls of a run may therefore never be reported.
        """
        return flag

    def barrier(self) -> None:
        """Wait until every rank has reached this call."""

    def from_rank_0(self, make: Callable[[], T]) -> T:
        """Call `make` on rank 0, and return its result on every rank.

        The result must be of a type that `json_encoding.encode` supports.

        Raises:
            Exception: on rank 0, any exception that `make` raises.
            ConfigError: on the other ranks, if `make` raised this ConfigError on rank 0.
            LostError: on the other ranks, if `make` raised any other exception, or its result cannot be encoded.
            TypeError: on rank 0, if there are several ranks and the result cannot be encoded.
        """
        return make()

    def on_all_ranks(self, make: Callable[[], T]) -> T:
        """Call `make` on every rank, and return its result.

        Raises:
            ConfigError: on every rank, if `make` raised it on one of them; that of the lowest such rank.
        """
        return make()

    def all_gather(self, value: Any) -> list[Any]:
        """Return the `value` of each rank, in the order of the ranks.

        The `value` must be of a type that `json_encoding.encode` supports.
        """
        return [value]

    def gather_to_rank0(self, tensors: dict[Any, Any]) -> dict[Any, Any]:
        """On rank 0, return the tensors of all ranks by name; on other ranks, return an empty dict.

        Args:
            tensors: a dict from name to a tensor on the CPU, or to a plain value. If several ranks use the same name,
                the value of the lowest rank is returned.
        """
        return tensors

    def finish(self) -> None:
        """Wait for pending operations."""


class _TensorSpec(NamedTuple):
    """The shape and dtype of a tensor, which are sent to the other ranks in place of the tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(value: Any) -> Any:
        """Return the spec of `value` if it is a tensor; otherwise return `value` itself."""
        return _TensorSpec(tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else value


class ProcessGroup(Collectives):
    """The collectives of several processes, over the default process group of `torch.distributed`.

    Args:
        timeout: seconds that a rank waits for the others.
        shared_state: shared memory that the launcher has allocated for all processes of this machine; only used in a
            subclass.
    """

    def __init__(self, timeout: float, shared_state: Any = None):
        self.rank, self.world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self.timeout = timeout
        self._pending: tuple[torch.Tensor, Any] | None = None

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
        """Return whether `flag` was true on any rank in the previous call; False in the first call.

        The all-reduce can therefore overlap with a training step.
        """
        ours = torch.tensor(int(flag))
        work = torch.distributed.all_reduce(ours, torch.distributed.ReduceOp.MAX, async_op=True)
        (previous, previous_work), self._pending = self._pending or (torch.tensor(0), None), (ours, work)
        if previous_work is not None:
            previous_work.wait()
        return bool(previous)

    def barrier(self) -> None:
        torch.distributed.all_reduce(torch.zeros(()))  # of a CPU tensor: over gloo, for any device

    def from_rank_0(self, make: Callable[[], T]) -> T:
        if self.rank > 0:
            result, refusal, failure = decode(_broadcast(b""))
            if refusal is not None:
                raise refusal
            if failure:
                raise LostError(f"rank 0 failed: {failure}")
            return result
        try:
            result = make()
            message = encode([result, None, ""])
        except Exception as error:
            is_refusal = isinstance(error, ConfigError)
            _broadcast(encode([None, error, ""] if is_refusal else [None, None, f"{type(error).__name__}: {error}"]))
            raise
        _broadcast(message)
        return result

    def on_all_ranks(self, make: Callable[[], T]) -> T:
        result, refusal = None, None
        try:
            result = make()
        except ConfigError as error:
            refusal = error
        for refused in self.all_gather(refusal):
            if refused is not None:
                raise refused
        return cast(T, result)

    def all_gather(self, value: Any) -> list[Any]:
        own = _bytes_to_tensor(encode(value))
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        torch.distributed.all_gather(sizes, torch.tensor([len(own)]))
        longest = _checked(max(int(size) for size in sizes))
        padded = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.world_size)]
        torch.distributed.all_gather(padded, torch.nn.functional.pad(own, (0, longest - len(own))))
        return [decode(each[: int(size)].numpy().tobytes()) for each, size in zip(padded, sizes, strict=True)]

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
        if self._pending is not None:
            self._pending[1].wait()
            self._pending = None

    def forget(self) -> None:
        """Drop pending operations without waiting for them; called if they will not complete."""
        self._pending = None


def _broadcast(message: bytes) -> bytes:
    """Broadcast the `message` of rank 0 over gloo, and return this message; what other ranks pass is ignored."""
    sent = _bytes_to_tensor(message)
    size = torch.tensor([len(sent)])
    torch.distributed.broadcast(size, 0)
    if torch.distributed.get_rank() > 0:
        sent = torch.empty(_checked(int(size)), dtype=torch.uint8)
    torch.distributed.broadcast(sent, 0)
    return sent.numpy().tobytes()


def _bytes_to_tensor(message: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(message), dtype=torch.uint8) if message else torch.empty(0, dtype=torch.uint8)


def _checked(num_bytes: int) -> int:
    """Return `num_bytes`, the size of a message from another rank, if it is within the limit.

    Raises:
        ValueError: if `num_bytes` is negative or greater than `_MOST_BYTES`.
    """
    if not 0 <= num_bytes <= _MOST_BYTES:
        raise ValueError(f"a message of {num_bytes} bytes from another rank: at most {_MOST_BYTES} are read")
    return num_bytes
