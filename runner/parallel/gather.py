"""Tensors that several processes have parts of, brought together by name."""

from __future__ import annotations

from typing import Any

import torch


def gathered(own: dict[Any, Any], rank: int, world_size: int) -> dict[Any, Any]:
    """What all processes have, on rank 0; nothing on the others. No name is at two of them.

    Args:
        own: tensors on the CPU, and plain values, by name.
    """
    lists: list[Any] | None = [None] * world_size if rank == 0 else None
    described = [
        (name, (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else value, _is_tensor(value))
        for name, value in own.items()
    ]
    torch.distributed.gather_object(described, lists)
    if lists is None:
        for value in own.values():
            if _is_tensor(value):
                torch.distributed.send(value.contiguous(), 0)
        return {}
    everything = dict(own)
    for source, names in enumerate(lists):
        for name, value, is_tensor in names if source else []:
            if is_tensor:
                shape, dtype = value
                value = torch.empty(shape, dtype=dtype)
                torch.distributed.recv(value, source)
            everything[name] = value
    return everything


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)
