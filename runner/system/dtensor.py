"""The local parts of `DTensor`s, without the slow import of `torch.distributed.tensor`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def is_dtensor(tensor: Any) -> bool:
    """Return whether `tensor` is a `DTensor`, of which each process holds a part."""
    return hasattr(tensor, "device_mesh")


def local_part(tensor: Any) -> torch.Tensor:
    """Return the part of a `DTensor` that this process holds, or any other tensor unchanged.

    An elementwise operation on all local parts is the same operation on the whole tensors, if all of them have the same
    placements.
    """
    return tensor.to_local() if is_dtensor(tensor) else tensor
