"""The buffers of a network and its loss, which an evaluation and a checkpoint leave as they were."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from runner.parallel.collectives import Collectives


def named_buffers(modules: Sequence[torch.nn.Module]) -> dict[str, torch.Tensor]:
    """Return the dense buffers of all `modules` by name, after the number of the module."""
    named = (
        (f"{number}.{name}", each) for number, module in enumerate(modules) for name, each in module.named_buffers()
    )
    return {name: each.detach() for name, each in named if each.layout == torch.strided and not each.is_quantized}


def average(buffers: Mapping[str, torch.Tensor], collectives: Collectives) -> None:
    """Give all ranks the means of floating-point and complex `buffers`, in place, and those of rank 0 of all others.

    The means are computed in float64, so that equal values do not change.
    """
    wide = {name: each.to(torch.complex128) for name, each in buffers.items() if each.is_complex()}
    wide |= {name: each.double() for name, each in buffers.items() if each.is_floating_point()}
    for name, total in collectives.all_reduce(wide).items():
        buffers[name].copy_(total / collectives.world_size)
    collectives.broadcast([each for name, each in buffers.items() if name not in wide])


@contextmanager
def buffers_kept(modules: Sequence[torch.nn.Module]) -> Iterator[None]:
    """A context at whose end buffers have their values of before, also those that forward has replaced.

    One that has another shape or dtype by then stays as it is: a table that has grown.
    """
    before = [
        (module, name, buffer, buffer.detach().clone())
        for each in modules
        for module in each.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    try:
        yield
    finally:
        for module, name, buffer, value in before:
            now = module._buffers.get(name)
            if now is None or (now.shape, now.dtype) == (value.shape, value.dtype):
                module._buffers[name] = buffer
                buffer.detach().copy_(value)


def with_own_memory(module: torch.nn.Module) -> torch.nn.Module:
    """Give expanded buffers, which cannot be written, memory for each element, and return `module`."""
    for each in module.modules():
        for name, buffer in each.named_buffers(recurse=False):
            if buffer.layout == torch.strided and 0 in buffer.stride() and not buffer.is_contiguous():
                each._buffers[name] = buffer.clone(memory_format=torch.contiguous_format)
    return module
