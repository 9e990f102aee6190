"""Memory of a step by kind: a dispatch mode that follows each tensor's storage from its allocation to its release."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from runner.planning.costs import Costs

KINDS: tuple[str, ...] = ("parameters", "gradients", "optimizer state", "data", "activations", "temporary")
"""What memory is used for.

`parameters` includes buffers, such as the running statistics of batch normalization, and the weights of a target
network; with fsdp, also the parameters that have been gathered for a block. `optimizer state` includes the moving
average of the weights. `data` is the data set or the replay buffer, as far as it is on the device, and batches.
`activations` are kept from the forward pass for the backward pass. `temporary` is what the backward pass and the update
allocate for themselves, such as the gradients of activations, recomputed activations and workspaces.
"""


class MemoryTracker(TorchDispatchMode):
    """A dispatch mode that counts allocated storages by kind, and the costs of operations and messages.

    Only tensors are counted. The memory of the Python process, of libraries and of a CUDA context, and the memory that
    an allocator keeps for later, are additional.

    Args:
        fake_mode: the fake mode whose tensors are counted. Torch creates fake tensors of other modes to find out
            shapes; these are not counted.
        workspace: function that is called with an operation and its arguments. It returns the size of the operation's
            temporary buffers in bytes.
    """

    def __init__(self, fake_mode: Any, workspace: Callable[[Any, tuple[Any, ...]], int]):
        super().__init__()
        self._fake_mode, self._workspace = fake_mode, workspace
        self.costs = Costs()
        self.kind = "temporary"
        """The kind of what is allocated now; in a backward pass, `activations` are counted as `temporary` instead."""
        self.current: dict[str, int] = dict.fromkeys(KINDS, 0)
        """Allocated bytes by kind."""
        self.peak = dict(self.current)
        """Allocated bytes by kind at the moment when their sum was largest."""
        self._peak_total = 0
        self._storages: dict[int, tuple[str, int, Any]] = {}
        """The kind, the size in bytes and a weak reference of each storage, by the address of the C++ object."""

    def __enter__(self) -> MemoryTracker:
        self._resize = torch.UntypedStorage.resize_
        self._patch = patch.object(torch.UntypedStorage, "resize_", self._resizing())
        self._patch.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._patch.stop()
        super().__exit__(*error)

    def _resizing(self) -> Callable[[torch.UntypedStorage, int], Any]:
        """Return a replacement for `torch.UntypedStorage.resize_` that also counts the new size of the storage.

        FSDP releases gathered parameters by resizing their storages to 0, without an operation on tensors.
        """

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = self._resize(storage, size)
            if (key := storage._cdata) in self._storages:
                self._set(key, "parameters", storage.nbytes())
            return result

        return resize_

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if any(hasattr(each, "__tensor_flatten__") for each in types):
            return NotImplemented  # a DTensor calls operations on its local tensors, which are counted instead
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if getattr(tensor, "fake_mode", None) is self._fake_mode:
                self._add(tensor.untyped_storage())
        self.costs.add(func, args, kwargs or {}, result, in_backward())
        self._update_peak(self._workspace(func, args))
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._storages:
            kind = "temporary" if self.kind == "activations" and in_backward() else self.kind
            self._storages[key] = (kind, 0, weakref.ref(storage, lambda _: self._remove(key)))
            self._set(key, kind, storage.nbytes())

    def _set(self, key: int, kind: str, size: int) -> None:
        """Set the kind and the size of a storage."""
        before, bytes_before, reference = self._storages[key]
        self.current[before] -= bytes_before
        self.current[kind] += size
        self._storages[key] = (kind, size, reference)

    def _remove(self, key: int) -> None:
        kind, size, _ = self._storages.pop(key)
        self.current[kind] -= size

    def _update_peak(self, workspace: int) -> None:
        total = sum(self.current.values()) + workspace
        if total > self._peak_total:
            self._peak_total = total
            self.peak = self.current | {"temporary": self.current["temporary"] + workspace}

    def begin(self) -> None:
        """Begin a new measurement of the peak and the costs."""
        self.costs, self.peak, self._peak_total = Costs(), dict(self.current), sum(self.current.values())

    def time_block(
        self,
        block: torch.nn.Module,
        x: torch.Tensor,
        autocast: Callable[[], AbstractContextManager],
        has_input_grad: bool,
    ) -> float:
        """Return an estimate of the time of a block: its number of floating-point operations, in billions.

        Used in place of `runner.parallel.pipelining.block_time.measured_seconds`, with the same arguments.
        """
        before = self.costs.flops
        with autocast():
            output = block(x.detach().requires_grad_(has_input_grad))
        if output.requires_grad:
            output.backward(torch.ones_like(output))
        return (self.costs.flops - before) / 1e9

    @contextmanager
    def allocating(self, kind: str) -> Iterator[None]:
        """Count what is allocated within this context as memory of `kind`."""
        before, self.kind = self.kind, kind
        try:
            yield
        finally:
            self.kind = before

    def set_kind(self, kind: str, tensors: Iterable[Any]) -> None:
        """Count the storages of `tensors` as `kind` from now on; ignore items that are not tensors, such as None."""
        for tensor in tensors:
            local = getattr(tensor, "_local_tensor", tensor)  # of a DTensor
            if isinstance(local, torch.Tensor) and (key := local.untyped_storage()._cdata) in self._storages:
                self._set(key, kind, self._storages[key][1])


def in_backward() -> bool:
    """Return whether autograd is executing a backward pass in this thread."""
    return torch._C._current_graph_task_id() != -1
