"""Tables of a network: the parameters of its blocks, and their outputs and floating-point operations.

The latter two are found without values, and only for `--summary`: the operators for tensors without values import
sympy and more, which takes as much CPU time as the start of a small run.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from models.blocks import blocks_of


class Row(NamedTuple):
    """A block of a network, or the whole network.

    Args:
        name: name of the block.
        kind: its class; of a block that groups several layers, their classes.
        output: shape of its output for one sample; None if it was not called, returns no tensor, or is not known.
        parameters: number of its parameters.
        trained: number of its parameters that require gradients.
        flops: floating-point operations of its forward pass for one sample, where a multiplication and an addition are
            two; only matrix products, convolutions and attention count. None if they are not known.
    """

    name: str
    kind: str
    output: tuple[int, ...] | None
    parameters: int
    trained: int
    flops: int | None


def parameter_rows(model: torch.nn.Module) -> list[Row]:
    """Return the rows of `rows_of` for a network on any device, without outputs and floating-point operations."""
    rows = [Row(name, _kind(part), None, *_counts(part), None) for name, part in _parts(model)]
    return [*rows, Row("total", type(model).__name__, None, *_counts(model), None)]


def rows_of(model: torch.nn.Module, shape: tuple[int, ...]) -> list[Row]:
    """Return a row for each block of `model`, or for each child if it lists no blocks, and the sum as the last row.

    Args:
        model: the network, on the meta device.
        shape: shape of one input.
    """
    from torch.utils.flop_counter import FlopCounterMode  # imported here: its imports take a tenth of a second

    parts = _parts(model)
    outputs: dict[str, tuple[int, ...]] = {}
    flops = dict.fromkeys((name for name, _ in parts), 0)
    x = torch.zeros(1, *shape, device="meta")
    model.eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:

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

        hooks = [module.register_forward_pre_hook(begin(name)) for name, module in parts]
        hooks += [module.register_forward_hook(end(name)) for name, module in parts]
        if blocks_of(model):
            for _, block in parts:
                x = block(x)
        else:
            x = model(x)
        for hook in hooks:
            hook.remove()
        total = counter.get_total_flops()
    rows = [Row(name, _kind(part), outputs.get(name), *_counts(part), flops[name]) for name, part in parts]
    whole = tuple(x.shape[1:]) if isinstance(x, torch.Tensor) else None
    return [*rows, Row("total", type(model).__name__, whole, *_counts(model), total)]


def formatted(rows: Iterable[Row]) -> str:
    """Return `rows` as aligned text, one line each, below a line of headings; without columns that are empty."""
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
    """Return the children of `model`, with the modules in a list, which has no forward pass, in place of the list."""
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
