"""Tables of a network: the parameters, the output and the floating-point operations of each block."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple

import torch

from models.blocks import blocks_of


class Row(NamedTuple):
    """A block of a network, or the whole network.

    Args:
        name: name of the block.
        kind: class of the block or, if it groups several layers, the classes of the layers.
        output: shape of the output for one sample; None if the block was not called or returns no tensor, or if the
            shape is not known.
        parameters: number of parameters.
        trained: number of parameters that require gradients.
        flops: floating-point operations of the forward pass for one sample; None if they are not known. Only matrix
            products, convolutions and attention count; a multiplication and an addition are two operations.
    """

    name: str
    kind: str
    output: tuple[int, ...] | None
    parameters: int
    trained: int
    flops: int | None


def table_of(model: torch.nn.Module, shape: tuple[int, ...] | None) -> str:
    """Return the table of a network for the log. To find the outputs, the network is called with an input of zeros.

    The weights and buffers of the network do not change. The network itself is called instead of a copy on the
    meta device, because operators on the meta device import sympy, and this import would double the time that a small
    run takes to start.

    Args:
        model: the network, before it is placed on its devices.
        shape: shape of one input; None if it is not known. If `shape` is None, or if the network cannot process an
            input of this shape, the table lacks the columns for outputs and floating-point operations.
    """
    if shape is not None:
        with suppress(Exception):  # whatever is wrong with the network, training says it better
            return formatted(rows_of(model, shape))
    return formatted(parameter_rows(model))


def parameter_rows(model: torch.nn.Module) -> list[Row]:
    """Return the same rows as `rows_of`, but without outputs and floating-point operations; `model` is not called."""
    rows = [Row(name, _kind(part), None, *_counts(part), None) for name, part in _parts(model)]
    return [*rows, Row("total", type(model).__name__, None, *_counts(model), None)]


def rows_of(model: torch.nn.Module, shape: tuple[int, ...]) -> list[Row]:
    """Return a row for each block of `model` (each child if `model` lists no blocks), and a row for the whole network.

    Args:
        model: the network, on any device. Its weights, buffers and training mode do not change.
        shape: shape of one input.

    Raises:
        Exception: whatever the forward pass of the network raises for an input of this shape.
    """
    from torch.utils.flop_counter import FlopCounterMode  # imported here: its imports take a tenth of a second

    parts = _parts(model)
    outputs: dict[str, tuple[int, ...]] = {}
    flops = dict.fromkeys((name for name, _ in parts), 0)
    x = torch.zeros(1, *shape, device=next((parameter.device for parameter in model.parameters()), None))
    with _unchanged(model), torch.no_grad(), ExitStack() as hooks, FlopCounterMode(display=False) as counter:

        def begin(name: str) -> Any:
            def hook(*_: Any) -> None:
                flops[name] -= counter.get_total_flops()

            return hook

        def end(name: str) -> Any:
            def hook(_: Any, __: Any, output: Any) -> None:
                flops[name] += counter.get_total_flops()
                if isinstance(output, torch.Tensor):
                    outputs[name] = tuple(output.shape[1:])

            return hook

        for name, module in parts:
            hooks.enter_context(module.register_forward_pre_hook(begin(name)))
            hooks.enter_context(module.register_forward_hook(end(name)))
        if blocks_of(model):
            for _, block in parts:
                x = block(x)
        else:
            x = model(x)
        total = counter.get_total_flops()
    rows = [Row(name, _kind(part), outputs.get(name), *_counts(part), flops[name]) for name, part in parts]
    whole = tuple(x.shape[1:]) if isinstance(x, torch.Tensor) else None
    return [*rows, Row("total", type(model).__name__, whole, *_counts(model), total)]


@contextmanager
def _unchanged(model: torch.nn.Module) -> Iterator[None]:
    """A context in which `model` is in evaluation mode. At the end, its buffers and training modes are restored."""
    training = {module: module.training for module in model.modules()}
    buffers = {name: (buffer, buffer.clone()) for name, buffer in model.named_buffers()}
    model.eval()
    try:
        yield
    finally:
        for name, (buffer, value) in buffers.items():
            owner, _, own_name = name.rpartition(".")
            setattr(model.get_submodule(owner), own_name, buffer.copy_(value))  # it may be another tensor now
        for module, was_training in training.items():
            module.training = was_training


def formatted(rows: Iterable[Row]) -> str:
    """Return `rows` as aligned text, one line per row, below a line of headings. Empty columns are left out."""
    cells: list[tuple[str, ...]] = [("block", "type", "output", "parameters", "trained", "FLOPs")]
    for row in rows:
        shape = "" if row.output is None else "×".join(map(str, row.output))
        cells.append((row.name, row.kind, shape, *("" if count is None else f"{count:,}" for count in row[3:])))
    columns = [column for column in range(6) if any(line[column] for line in cells[1:])]
    widths = {column: max(len(line[column]) for line in cells) for column in columns}
    lines = [
        [line[column].ljust(widths[column]) if column < 3 else line[column].rjust(widths[column]) for column in columns]
        for line in cells
    ]
    return "\n".join("  ".join(line).rstrip() for line in lines)


def _parts(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    return blocks_of(model) or _children(model)


def _children(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """Return (name, module) of each child of `model`.

    A child that is a `ModuleList` has no forward pass. The modules that it contains are returned in its place.
    """
    found = []
    for name, child in model.named_children():
        inside = child.named_children() if isinstance(child, torch.nn.ModuleList) else []
        found += [(f"{name}.{number}", each) for number, each in inside] or [(name, child)]
    return found


def _kind(module: torch.nn.Module) -> str:
    if type(module).__name__ != "Block":
        return type(module).__name__
    kinds = [type(layer).__name__ for layer in module.children()]
    return " ".join(kinds if len(kinds) <= 4 else [*kinds[:3], "…"])


def _counts(module: torch.nn.Module) -> tuple[int, int]:
    parameters = list(module.parameters())
    return sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad)
