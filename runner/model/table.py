"""Tables of a network: the parameters, the output and the floating-point operations of each block."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

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
    """Return the table of a network for the log; if `shape` does not suit it, without outputs and operations."""
    if shape is not None:
        with suppress(Exception):  # whatever is wrong with the network, training says it better
            return formatted(rows_of(model, shape))
    return formatted(rows_of(model, None))


def rows_of(model: torch.nn.Module, shape: tuple[int, ...] | None) -> list[Row]:
    """Return a row for each block of `model` (each child if `model` lists no blocks), and a row for the whole network.

    A copy of the network is called with zeros; not on the meta device, whose operators import sympy for a second. None
    as `shape` leaves out the outputs and operations. Raises whatever the forward pass raises.
    """
    blocks = blocks_of(model)
    measured: dict[str, tuple[tuple[int, ...], int]] = {}
    if shape is not None:
        from torch.utils.flop_counter import FlopCounterMode  # its imports take a tenth of a second

        x = torch.zeros(1, *shape, device=next((parameter.device for parameter in model.parameters()), None))
        called = copy.deepcopy(model).eval()  # the forward pass may change buffers
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            for name, part in blocks_of(called) or [("total", called)]:
                before = counter.get_total_flops()
                x = part(x)
                measured[name] = tuple(x.shape[1:]), counter.get_total_flops() - before
        measured["total"] = tuple(x.shape[1:]), counter.get_total_flops()
    rows = []
    for name, part in [*(blocks or model.named_children()), ("total", model)]:
        parameters = list(part.parameters())
        trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
        kind, kinds = type(part).__name__, [type(layer).__name__ for layer in part.children()]
        if kind == "Block":
            kind = " ".join(kinds if len(kinds) <= 4 else [*kinds[:3], "…"])
        output, flops = measured.get(name, (None, None))
        rows.append(Row(name, kind, output, sum(parameter.numel() for parameter in parameters), trained, flops))
    return rows


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
