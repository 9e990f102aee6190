"""The buffers of a network and its loss, which an evaluation and a checkpoint leave as they were."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from runner.parallel.collectives import Collectives


def named_buffers(modules: Sequence[torch.nn.Module]) -> dict[str, torch.Tensor]:
    """Return the dense buffers of all `modules` by name, after the number of the module."""
    named = [each for number, module in enumerate(modules) for each in module.named_buffers(str(number))]
    return {name: each.detach() for name, each in named if each.layout == torch.strided and not each.is_quantized}


def average(buffers: Mapping[str, torch.Tensor], collectives: Collectives) -> None:
    """Give all ranks the means of floating-point and complex `buffers`, in place, and those of rank 0 of all others.

    The means are computed in float64, so that equal values do not change. Buffers that do not have the same form on all
    ranks, as tables that have grown by other samples, stay as they are.
    """
    forms = collectives.all_gather({name: (tuple(each.shape), each.dtype) for name, each in buffers.items()})
    same = [name for name, form in forms[0].items() if all(each.get(name) == form for each in forms)]
    buffers = {name: buffers[name] for name in same}
    wide = {name: each.to(torch.complex128) for name, each in buffers.items() if each.is_complex()}
    wide |= {name: each.double() for name, each in buffers.items() if each.is_floating_point()}
    for name, total in collectives.all_reduce(wide).items():
        buffers[name].copy_(total / collectives.world_size)
    collectives.broadcast([each for name, each in buffers.items() if name not in wide])


@contextmanager
def buffers_kept(modules: Sequence[torch.nn.Module]) -> Iterator[None]:
    """A context at whose end modules have the buffers of before, with their values, also if forward replaces them."""
    before = [
        (module, name, buffer, None if buffer is None else buffer.detach().clone())
        for each in modules
        for module in each.modules()
        for name, buffer in module._buffers.items()
    ]
    try:
        yield
    finally:
        for module, name, buffer, value in before:
            if buffer is None or value is None:
                module._buffers[name] = buffer
            elif buffer.shape == value.shape:
                buffer.detach().copy_(value)
                module._buffers[name] = buffer
            else:  # resized in place
                module._buffers[name] = value


def with_own_memory(module: torch.nn.Module) -> torch.nn.Module:
    """Give expanded buffers, which cannot be written, memory for each element, and return `module`."""
    for each in module.modules():
        for name, buffer in each.named_buffers(recurse=False):
            if buffer.layout == torch.strided and 0 in buffer.stride() and not buffer.is_contiguous():
                each._buffers[name] = buffer.clone(memory_format=torch.contiguous_format)
    return module
