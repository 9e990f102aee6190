"""A dispatch mode that counts the memory of a step by kind, its floating-point operations and its messages."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import conv_flop_count, flop_registry

from runner.models.blocks import attention_flops

KINDS: tuple[str, ...] = ("parameters", "gradients", "optimizer state", "data", "activations", "temporary")
"""What memory is used for.

`parameters` includes buffers, such as the running statistics of batch normalization, and the weights of a target
network; with fsdp, also the parameters that have been gathered for a block. `optimizer state` includes the moving
average of the weights. `data` is the data set or the replay buffer, as far as it is on the device, and batches.
`activations` are kept from the forward pass for the backward pass. `temporary` is what the backward pass and the update
allocate for themselves, such as the gradients of activations, recomputed activations and reordered weights.
"""

_COLLECTIVES = {
    "allreduce_": "all-reduce",
    "_allgather_base_": "all-gather",
    "allgather_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "broadcast_": "broadcast",
    "send": "send",
}
"""The name of each collective, by the name of torch's operation."""


def _convolution_backward_flops(
    gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *others: Any, **_: Any
) -> int:
    """Return the operations of a backward pass: as many as in the forward pass for each of the two gradients.

    torch's formula counts all pairs of channels for the gradient of the weight, also if they are in different groups.
    """
    transposed, _output_padding, _groups, output_mask = others[-4:]
    return sum(output_mask[:2]) * conv_flop_count([*x.shape], [*weight.shape], [*gradient.shape], transposed)


setattr(_convolution_backward_flops, "_get_raw", True)  # noqa: B010  # of tensors, not of their shapes
OWN_FLOPS = {**attention_flops(), torch.ops.aten.convolution_backward: _convolution_backward_flops}
"""The functions that count the floating-point operations of an operator, where torch's counts others."""


@dataclass
class Costs:
    """The floating-point operations and the messages of one process.

    Args:
        flops: floating-point operations of matrix products, convolutions and attention, as in
            `torch.utils.flop_counter`; a multiplication and an addition are two.
        backward_flops: those of backward passes, including forward passes that are recomputed there.
        messages: for each collective, and `send`, the number of calls and the sum of their bytes: those of the input or
            the output, whichever is larger. Receives and barriers do not count.
    """

    flops: int = 0
    backward_flops: int = 0
    messages: dict[str, tuple[int, int]] = field(default_factory=dict)

    def sent_bytes(self, world_size: int) -> float:
        """Return how many bytes the process sends, assuming ring collectives over `world_size` processes.

        In a ring of n processes, each process sends (n − 1)/n of the tensor for an all-gather or a reduce-scatter, and
        twice as much for an all-reduce: Patarasuk and Yuan, Bandwidth Optimal All-reduce Algorithms (2009).
        """
        ring = (world_size - 1) / world_size
        times = {"all-reduce": 2 * ring, "all-gather": ring, "reduce-scatter": ring, "broadcast": 1, "send": 1}
        return sum(size * times[name] for name, (_, size) in self.messages.items())


class StepTracker(TorchDispatchMode):
    """A dispatch mode that counts allocated storages by kind, and the costs of operations and messages.

    `torch.distributed._tools.MemTracker` would count batches and the data set as activations. Only tensors of
    `fake_mode` are counted, as torch creates fake tensors of other modes to find out shapes. `further` micro-batches
    are counted as if each had the costs of the second one.
    """

    def __init__(self, fake_mode: Any, further: int = 0):
        super().__init__()
        self._fake_mode, self._further = fake_mode, further
        self.allocates_data = False
        self.current: dict[str, int] = dict.fromkeys(KINDS, 0)
        """Allocated bytes by kind."""
        self._storages: dict[int, tuple[str, int, Any]] = {}
        """The kind, the size in bytes and a weak reference of each storage, by the address of the C++ object."""
        self.begin()

    def begin(self) -> None:
        """Begin a new measurement of the peak and the costs."""
        self.costs, self.peak, self._number = Costs(), dict(self.current), 0

    def counting(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the micro-batches `batches`, and count them."""
        while True:
            self._number += 1
            yield next(batches)

    def __enter__(self) -> StepTracker:
        resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if (key := storage._cdata) in self._storages:
                self._set(key, "parameters", storage.nbytes())
            return result

        # FSDP releases gathered parameters by resizing their storages to 0, without an operation on tensors.
        self._patch = patch.object(torch.UntypedStorage, "resize_", resize_)
        self._patch.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._patch.stop()
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if any(hasattr(each, "__tensor_flatten__") for each in types):
            return NotImplemented  # a DTensor calls operations on its local tensors, which are counted instead
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if getattr(tensor, "fake_mode", None) is self._fake_mode:
                self._add(tensor.untyped_storage())
        if sum(self.current.values()) > sum(self.peak.values()):
            self.peak = dict(self.current)
        packet, times = func.overloadpacket, 1 + self._further if self._number == 2 else 1
        if count := OWN_FLOPS.get(packet) or flop_registry.get(packet):
            flops = times * count(*args, **(kwargs or {}), out_val=result)
            self.costs.flops += flops
            self.costs.backward_flops += flops if _in_backward() else 0
        elif func.namespace == "c10d" and (name := _COLLECTIVES.get(packet.__name__)) is not None:
            calls, total = self.costs.messages.get(name, (0, 0))
            # The whole tensor is the output or the input, whichever is larger.
            size = max(_num_bytes(args[0]), _num_bytes(args[1]))
            self.costs.messages[name] = calls + times, total + times * size
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._storages:
            is_forward = torch.is_grad_enabled() and not _in_backward()
            kind = "data" if self.allocates_data else "activations" if is_forward else "temporary"
            self._storages[key] = (kind, 0, weakref.ref(storage, lambda _: self._remove(key)))
            self._set(key, kind, storage.nbytes())

    def _set(self, key: int, kind: str, size: int) -> None:
        before, bytes_before, reference = self._storages[key]
        self.current[before] -= bytes_before
        self.current[kind] += size
        self._storages[key] = (kind, size, reference)

    def _remove(self, key: int) -> None:
        kind, size, _ = self._storages.pop(key)
        self.current[kind] -= size

    def set_kind(self, kind: str, tensors: Iterable[Any]) -> None:
        """Count the storages of `tensors` as `kind` from now on; ignore items that are not tensors, such as None."""
        for tensor in tensors:
            local = getattr(tensor, "_local_tensor", tensor)  # of a DTensor
            if isinstance(local, torch.Tensor) and (key := local.untyped_storage()._cdata) in self._storages:
                self._set(key, kind, self._storages[key][1])


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _num_bytes(tensors: Any) -> int:
    return sum(tensor.nbytes for tensor in tree_iter(tensors) if isinstance(tensor, torch.Tensor))
