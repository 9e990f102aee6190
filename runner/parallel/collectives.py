"""A process among those of its run: its rank, its devices, and the collective operations of all ranks.

https://docs.pytorch.org/docs/stable/distributed.html#collective-functions
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch

from runner.config.errors import ABSENT, ConfigError
from runner.parallel.launch.supervisor import LostError
from runner.tracking.metrics import MetricSums

T = TypeVar("T")


def encode(value: Any) -> bytes:
    """Return `value`, plain Python values, tensors and dtypes, nested in any way, as a message to another rank."""
    torch.save(value, buffer := io.BytesIO())
    return buffer.getvalue()


def decode(message: bytes) -> Any:
    """Return the value that was encoded as `message`, with tensors on the CPU; raise a `ValueError` for any other.

    No code of the sender is executed.
    """
    try:
        return torch.load(io.BytesIO(message), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise ValueError("a message from another rank has other values than plain ones, tensors and dtypes") from error


class Collectives:
    """One process, and its collectives. In this class, which no other process is connected to, they are no-ops.

    In the subclasses for several processes, all ranks must make the same calls.

    The process computes on `devices`; the first one holds the batches and the metrics.
    """

    timeout = math.inf
    """Seconds that a rank waits for the others."""

    def __init__(self, devices: Sequence[torch.device], rank: int = 0, world_size: int = 1):
        self.devices, self.rank, self.world_size = list(devices), rank, world_size

    def all_reduce(self, sums: MetricSums) -> MetricSums:
        """Return the sum over all ranks of each tensor in `sums`: means of unequal shards would not be exact.

        Lists are joined in the order of the ranks, with tensors on the CPU; every rank has the same ones.
        """
        return sums

    def local_share(self, total: torch.Tensor) -> torch.Tensor:
        """Return what this rank passes to `all_reduce` so that it returns `total` again, which all ranks have."""
        return total

    def any_rank(self, flag: bool) -> bool:
        """Return whether `flag` is true on any rank. The result is the same on all ranks.

        To avoid waiting, a subclass may report a true `flag` only in a later call, and so perhaps never.
        """
        return flag

    def combine_overflow(self, found_inf: torch.Tensor) -> None:
        """Set `found_inf`, the overflow flag of `torch.amp.GradScaler`, to its maximum over the ranks."""
        found_inf.copy_(self.all_reduce({"": found_inf})[""].clamp(max=1))

    def barrier(self) -> None:
        """Wait until every rank has reached this call."""

    def from_rank_0(self, make: Callable[[], T]) -> T:
        """Call `make` on rank 0, and return its result, which `encode` must take, or raise its error, on every rank."""
        return make()

    def on_all_ranks(self, make: Callable[[], T]) -> T:
        """Call `make` on every rank, and return its result; if ranks fail, raise the error of the lowest on all ranks.

        An error other than a `ConfigError` is a `LostError` on the other ranks.
        """
        return make()

    def all_gather(self, value: Any) -> list[Any]:
        """Return the `value` of each rank, in the order of the ranks: plain Python values, tensors and dtypes."""
        return [value]

    def gather_to_rank0(self, tensors: dict[Any, Any]) -> dict[Any, Any]:
        """On rank 0, return the tensors on the CPU, or plain values, of all ranks by name; elsewhere, an empty dict.

        If several ranks use the same name, the value of the lowest rank is returned.
        """
        return tensors

    def broadcast(self, tensors: Sequence[torch.Tensor], source: int = 0) -> None:
        """Copy the values of `tensors` on the rank `source` to those of all ranks."""

    def finish(self) -> None:
        """Wait for pending operations."""


class ProcessGroup(Collectives):
    """The collectives of several processes, over the default process group of `torch.distributed`."""

    def __init__(self, devices: Sequence[torch.device], timeout: float, shared_state: Any = None):
        super().__init__(devices, torch.distributed.get_rank(), torch.distributed.get_world_size())
        self.timeout = timeout
        self._pending: tuple[torch.Tensor, Any] | None = None

    def all_reduce(self, sums: MetricSums) -> MetricSums:
        lists = {name: value for name, value in sums.items() if isinstance(value, list)}
        totals = {name: tensor.clone() for name, tensor in sums.items() if name not in lists}
        for total in totals.values():
            torch.distributed.all_reduce(total)
        gathered = self.all_gather(lists) if lists else []
        return totals | {name: [item for each in gathered for item in each[name]] for name in lists}

    def local_share(self, total: torch.Tensor) -> torch.Tensor:
        return total if self.rank == 0 else torch.zeros_like(total)

    def any_rank(self, flag: bool) -> bool:
        """Return whether `flag` was true on any rank in the previous call: the all-reduce overlaps with a step."""
        ours = torch.tensor(int(flag))
        work = torch.distributed.all_reduce(ours, torch.distributed.ReduceOp.MAX, async_op=True)
        (previous, previous_work), self._pending = self._pending or (torch.tensor(0), None), (ours, work)
        if previous_work is not None:
            previous_work.wait()
        return bool(previous)

    def barrier(self) -> None:
        torch.distributed.all_reduce(torch.zeros(()))  # of a CPU tensor: over gloo, for any device

    def from_rank_0(self, make: Callable[[], T]) -> T:
        return cast(T, self.all_gather(self.on_all_ranks(lambda: make() if self.rank == 0 else None))[0])

    def on_all_ranks(self, make: Callable[[], T]) -> T:
        result, error, sent = None, None, None
        try:
            result = make()
        except ConfigError as refusal:
            error, got = refusal, () if refusal.got is ABSENT else refusal.got
            plain = isinstance(got, bool | int | float | str | list | tuple | None)
            sent = refusal.key, got if plain else repr(got), refusal.why, refusal.remedy  # it is only displayed
        except Exception as failure:  # the other ranks wait
            error, sent = failure, f"{type(failure).__name__}: {failure}"
        for rank, received in enumerate(self.all_gather(sent)):
            if rank == self.rank and error is not None:
                raise error
            if isinstance(received, str):
                raise LostError(f"rank {rank} failed: {received}")
            if received is not None:
                key, got, why, remedy = received
                raise ConfigError(key, ABSENT if got == () else got, why, remedy)
        return cast(T, result)

    def all_gather(self, value: Any) -> list[Any]:
        message = torch.frombuffer(bytearray(encode(value)), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        torch.distributed.all_gather(sizes, torch.tensor([len(message)]))
        longest = max(int(size) for size in sizes)
        padded = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.world_size)]
        torch.distributed.all_gather(padded, torch.nn.functional.pad(message, (0, longest - len(message))))
        return [decode(each[: int(size)].numpy().tobytes()) for each, size in zip(padded, sizes, strict=True)]

    def gather_to_rank0(self, tensors: dict[Any, Any]) -> dict[Any, Any]:
        specs = {name: (tuple(t.shape), t.dtype) for name, t in tensors.items() if isinstance(t, torch.Tensor)}
        plain = {name: value for name, value in tensors.items() if name not in specs}
        gathered: dict[Any, Any] = {}
        for source, (specs_there, plain_there) in enumerate(self.all_gather((specs, plain))):
            gathered = plain_there | gathered
            for name, (shape, dtype) in specs_there.items():
                if name in gathered:
                    continue
                gathered[name] = torch.empty(shape, dtype=dtype) if source and self.rank == 0 else tensors.get(name)
                if source and self.rank == source:
                    torch.distributed.send(bytes_of(tensors[name]), 0)
                elif source and self.rank == 0:
                    torch.distributed.recv(bytes_of(gathered[name]), source)
        return gathered if self.rank == 0 else {}

    def broadcast(self, tensors: Sequence[torch.Tensor], source: int = 0) -> None:
        for tensor in tensors:
            content = tensor.detach().contiguous()
            torch.distributed.broadcast(bytes_of(content), source)
            tensor.detach().copy_(content)

    def finish(self) -> None:
        if self._pending is not None:
            self._pending[1].wait()
            self._pending = None

    def forget(self) -> None:
        """Drop pending operations without waiting for them; called if they will not complete."""
        self._pending = None


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous `tensor`, which share its memory: gloo does not know all dtypes."""
    return tensor.detach().contiguous().flatten().view(torch.uint8)
