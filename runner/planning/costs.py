"""Costs of a step: floating-point operations, memory traffic, and the bytes that processes send to each other."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

_COLLECTIVES = {
    "allreduce_": "all-reduce",
    "_allgather_base_": "all-gather",
    "allgather_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "broadcast_": "broadcast",
    "send": "send",
}
"""The name of each collective, by the name of torch's operation."""


class Machine(NamedTuple):
    """The speed of the devices of a plan.

    Args:
        flops: floating-point operations per second of a device.
        bandwidth: bytes per second that a device reads from or writes to its memory.
        link: bytes per second that a device sends to another one.
    """

    flops: float
    bandwidth: float
    link: float


@dataclass
class Costs:
    """The costs of the operations of one process so far.

    Args:
        operations: a dict that counts the torch operations, except views and communication. Operations with the same
            cost are counted together. The key is their cost, a pair: the number of floating-point operations, and the
            total size of the arguments and results in bytes. The value is the number of these operations.
        backward_flops: floating-point operations in backward passes, including forward passes that are recomputed
            there.
        messages: a dict from the name of each collective, or `send`, to a pair: the number of calls, and the sum of
            their bytes. The bytes of a call are the size of its input or its output, whichever is larger. Receives and
            barriers do not count.
    """

    operations: Counter[tuple[int, int]] = field(default_factory=Counter)
    backward_flops: int = 0
    messages: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def flops(self) -> int:
        """The number of floating-point operations, where a multiplication and an addition are two.

        Only matrix products, convolutions and attention count, as in `torch.utils.flop_counter`.
        """
        return sum(flops * count for (flops, _), count in self.operations.items())

    def add(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, in_backward: bool) -> None:
        """Add the costs of one operation.

        Args:
            func: the operation.
            args, kwargs: its arguments.
            result: its result.
            in_backward: whether the operation is part of a backward pass.
        """
        packet = func.overloadpacket
        if func.namespace == "c10d":
            self._add_message(packet.__name__, args)
        elif not func.is_view:
            flops = flop_registry[packet](*args, **kwargs, out_val=result) if packet in flop_registry else 0
            self.operations[flops, _num_bytes((args, result))] += 1
            self.backward_flops += flops if in_backward else 0

    def _add_message(self, operation: str, args: tuple[Any, ...]) -> None:
        if (name := _COLLECTIVES.get(operation)) is None:  # a receive, or a barrier
            return
        calls, total = self.messages.get(name, (0, 0))
        # The whole tensor is the output or the input, whichever is larger.
        self.messages[name] = (calls + 1, total + max(_num_bytes(args[0]), _num_bytes(args[1])))

    def repeated(self, shorter: Costs, times: int) -> Costs:
        """Return these costs plus `times * (these costs - shorter)`, to extrapolate to more micro-batches.

        For example, if these are the costs of a step with three micro-batches, and `shorter` those with two, the result
        is the costs of a step with 3 + `times` micro-batches. Each count in `operations` is extrapolated separately. A
        count in the result can be negative, for example that of an operation that occurs only in `shorter`.
        """
        operations = Counter({each: count * (times + 1) for each, count in self.operations.items()})
        operations.subtract({each: count * times for each, count in shorter.operations.items()})
        messages = {}
        for name, (calls, size) in self.messages.items():
            fewer, smaller = shorter.messages.get(name, (0, 0))
            messages[name] = calls + times * (calls - fewer), size + times * (size - smaller)
        return Costs(
            operations,
            self.backward_flops + times * (self.backward_flops - shorter.backward_flops),
            messages,
        )

    def sent_bytes(self, world_size: int) -> float:
        """Return how many bytes the process sends, assuming ring collectives over `world_size` processes.

        In a ring of n processes, each process sends (n − 1)/n of the tensor for an all-gather or a reduce-scatter, and
        twice as much for an all-reduce: Patarasuk and Yuan, Bandwidth Optimal All-reduce Algorithms (2009).
        """
        ring = (world_size - 1) / world_size
        times = {"all-reduce": 2 * ring, "all-gather": ring, "reduce-scatter": ring, "broadcast": 1, "send": 1}
        return sum(size * times[name] for name, (_, size) in self.messages.items())

    def seconds(self, machine: Machine, world_size: int) -> float:
        """Return a lower bound on the time in seconds, assuming that communication does not overlap with computation.

        Each operation takes the time of its arithmetic or that of its memory traffic, whichever is longer: Williams et
        al., Roofline (2009).
        """
        computed = sum(
            max(flops / machine.flops, size / machine.bandwidth) * count
            for (flops, size), count in self.operations.items()
        )
        return computed + self.sent_bytes(world_size) / machine.link


def _num_bytes(tensors: Any) -> int:
    return sum(tensor.nbytes for tensor in tree_iter(tensors) if isinstance(tensor, torch.Tensor))
