"""Tables of a network: the parameters, the output and the floating-point operations of each block."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple

import torch

from models.blocks import blocks_of


class Row(NamedTuple):
    """A block of a network, or the whole network.

    `kind` is its class or, if it groups several layers, those of the layers. `output` is the shape for one sample, and
    `flops` the floating-point operations of its forward pass; None if they are not known. Only matrix products,
    convolutions and attention count; a multiplication and an addition are two operations.
    """

    name: str
    kind: str
    output: tuple[int, ...] | None
    parameters: int
    trained: int
    flops: int | None


def table_of(model: torch.nn.Module, shape: tuple[int, ...] | None) -> str:
    """Return the table of a network for the log; if `shape` does not suit it, without outputs and operations.

    The network is called with zeros. It is not copied to the meta device, whose operators import sympy for a second.
    """
    if shape is not None:
        with suppress(Exception):  # whatever is wrong with the network, training says it better
            return formatted(rows_of(model, shape))
    return formatted(rows_of(model, None))


def rows_of(model: torch.nn.Module, shape: tuple[int, ...] | None) -> list[Row]:
    """Return a row for each block of `model` (each child if `model` lists no blocks), and a row for the whole network.

    Raises whatever the forward pass raises for an input of `shape`; None leaves out outputs and operations.
    """
    parts = blocks_of(model) or _children(model)
    outputs: dict[str, Any] = {}
    flops: dict[str, int] = {}
    if shape is not None:
        flops = dict.fromkeys([*(name for name, _ in parts), "total"], 0)
        _call(model, parts, shape, outputs, flops)
    rows = []
    for name, part in [*parts, ("total", model)]:
        counts = [(p.numel(), p.numel() * p.requires_grad) for p in part.parameters()]
        num_parameters, num_trained = (sum(each) for each in zip(*counts, strict=True)) if counts else (0, 0)
        output = tuple(outputs[name].shape[1:]) if isinstance(outputs.get(name), torch.Tensor) else None
        kinds = [type(layer).__name__ for layer in part.children()]
        kind = type(part).__name__
        if kind == "Block":
            kind = " ".join(kinds if len(kinds) <= 4 else [*kinds[:3], "…"])
        rows.append(Row(name, kind, output, num_parameters, num_trained, flops.get(name)))
    return rows


def _call(
    model: torch.nn.Module,
    parts: list[tuple[str, torch.nn.Module]],
    shape: tuple[int, ...],
    outputs: dict[str, Any],
    flops: dict[str, int],
) -> None:
    """Call `model`, and put the outputs and the operations of its parts, which it may call several times, in dicts."""
    from torch.utils.flop_counter import FlopCounterMode  # its imports take a tenth of a second

    x = torch.zeros(1, *shape, device=next((parameter.device for parameter in model.parameters()), None))
    with _unchanged(model), torch.no_grad(), ExitStack() as hooks, FlopCounterMode(display=False) as counter:
        for name, module in parts:

            def begin(*_: Any, name: str = name) -> None:
                flops[name] -= counter.get_total_flops()

            def end(_: Any, __: Any, output: Any, name: str = name) -> None:
                flops[name] += counter.get_total_flops()
                outputs[name] = output

            hooks.enter_context(module.register_forward_pre_hook(begin))
            hooks.enter_context(module.register_forward_hook(end))
        if blocks_of(model):
            for _, block in parts:  # `model.blocks()` may return others in its forward pass
                x = block(x)
        else:
            x = model(x)
        outputs["total"], flops["total"] = x, counter.get_total_flops()


@contextmanager
def _unchanged(model: torch.nn.Module) -> Iterator[None]:
    """A context in which `model` is in evaluation mode; at the end, its buffers and training modes are restored."""
    training = {module: module.training for module in model.modules()}
    buffers = {name: (buffer, buffer.clone()) for name, buffer in model.named_buffers()}
    model.eval()
    try:
        yield
    finally:
        for name, (buffer, value) in buffers.items():
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, buffer.copy_(value))  # it may be another tensor now
        for module, was_training in training.items():
            module.training = was_training


def formatted(rows: Iterable[Row]) -> str:
    """Return `rows` as aligned text, one line per row, below a line of headings. Empty columns are left out."""
    lines: list[tuple[str, ...]] = [("block", "type", "output", "parameters", "trained", "FLOPs")]
    for row in rows:
        shape = "" if row.output is None else "×".join(map(str, row.output))
        lines.append((row.name, row.kind, shape, *("" if count is None else f"{count:,}" for count in row[3:])))
    columns = []
    for place, column in enumerate(zip(*lines, strict=True)):
        width = max(map(len, column))
        if any(column[1:]):
            columns.append([cell.ljust(width) if place < 3 else cell.rjust(width) for cell in column])
    return "\n".join("  ".join(cells).rstrip() for cells in zip(*columns, strict=True))


def _children(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """Return (name, module) of each child of `model`; of a `ModuleList`, which has no forward pass, its modules."""
    found = []
    for name, child in model.named_children():
        inside = child.named_children() if isinstance(child, torch.nn.ModuleList) else []
        found += [(f"{name}.{number}", each) for number, each in inside] or [(name, child)]
    return found
