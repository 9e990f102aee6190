"""The blocks of a network, between which a pipeline can split it, and a table of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch


def blocks_of(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """Return what the method `blocks()` of `model` returns, without one those of a `Sequential`, otherwise nothing.

    A submodule named `blocks`, which many networks have, does not count, nor does a method that returns something else.
    """
    if callable(blocks := getattr(type(model), "blocks", None)):
        with suppress(TypeError):  # it has other arguments, or returns one block
            found: Any = blocks(model)
            if all(isinstance(each, tuple) and len(each) == 2 and isinstance(each[0], str) for each in found):
                return found
    # Not `named_children`, which leaves out the second use of a module.
    return list(model._modules.items()) if type(model).forward is torch.nn.Sequential.forward else []  # pyright: ignore


def block_indices(model: torch.nn.Module) -> dict[str, int]:
    """Return the index of the block of each parameter by name; 0 for one of no block, and {} without blocks.

    Of a parameter of several blocks, as an embedding tied to the head, it is the first one.
    """
    blocks = blocks_of(model)
    index_of = {id(p): i for i, (_, block) in reversed([*enumerate(blocks)]) for p in block.parameters()}
    return {name: index_of.get(id(p), 0) for name, p in model.named_parameters()} if blocks else {}


def table_of(model: torch.nn.Module, shape: tuple[int, ...] | None) -> tuple[str, int]:
    """Return a table of the network, a line for each block or child and one for the whole, and its FLOPs.

    The columns are its name; its class or, if it groups several layers, those of the layers; the shape of the output
    for one sample; the number of parameters, and of those that are trained; and the floating-point operations of the
    forward pass: of matrix products, convolutions and attention, a multiplication and an addition being two. The third
    and the last are dashes, and the FLOPs 0, if `shape`, that of an input, is None or does not suit the network.
    """
    measured: dict[str, tuple[tuple[int, ...], int]] = {}
    for dtype in (torch.float32, torch.int64):  # of the second, indices of embeddings
        if shape is not None and not measured:
            with suppress(Exception):  # whatever is wrong with the network, training says it better
                measured = _outputs_and_flops(model, shape, dtype)
    rows: list[tuple[str, ...]] = [("block", "type", "output", "parameters", "trained", "FLOPs")]
    for name, part in [*(blocks_of(model) or model.named_children()), ("total", model)]:
        sizes = [(parameter.numel(), parameter.requires_grad) for parameter in part.parameters()]
        kind, kinds = type(part).__name__, [type(layer).__name__ for layer in part.children()]
        if kind == "Block":
            kind = " ".join(kinds if len(kinds) <= 4 else [*kinds[:3], "…"])
        output, flops = measured.get(name, (None, None))
        counts = sum(size for size, _ in sizes), sum(size for size, is_trained in sizes if is_trained), flops
        numbers = ("–" if count is None else f"{count:,}" for count in counts)
        rows.append((name, kind, "–" if output is None else "×".join(map(str, output)), *numbers))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [[*map(str.ljust, row[:3], widths), *map(str.rjust, row[3:], widths[3:])] for row in rows]
    return "\n".join(map("  ".join, lines)), measured["total"][1] if measured else 0


def _attention_flops(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> int:
    """Return the operations of two products of matrices for each head; the mask is not taken into account."""
    return 2 * query.shape[:3].numel() * key.shape[2] * (query.shape[3] + value.shape[3])


def _attention_backward_flops(
    gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> int:
    """Return the operations of five products of matrices, of which one is that of the forward pass once more."""
    return 2 * query.shape[:3].numel() * key.shape[2] * (3 * query.shape[3] + 2 * value.shape[3])


def attention_flops() -> dict[Any, Callable[..., int]]:
    """Return functions that count the operations of attention on CPUs, which `torch.utils.flop_counter` leaves out."""
    for function in (_attention_flops, _attention_backward_flops):
        setattr(function, "_get_raw", True)  # noqa: B010  # of tensors, not of their shapes
    return {
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
    }


def _outputs_and_flops(
    model: torch.nn.Module, shape: tuple[int, ...], dtype: torch.dtype
) -> dict[str, tuple[tuple[int, ...], int]]:
    """Call a copy of the network with zeros; not on the meta device, whose operators import sympy for a second."""
    from torch.utils.flop_counter import FlopCounterMode  # its imports take a tenth of a second

    x = torch.zeros(1, *shape, dtype=dtype, device=next((parameter.device for parameter in model.parameters()), None))
    model = copy.deepcopy(model).eval()  # the forward pass may change buffers
    measured = {}
    with torch.no_grad(), FlopCounterMode(display=False, custom_mapping=attention_flops()) as counter:
        for name, part in blocks_of(model) or [("total", model)]:
            before = counter.get_total_flops()
            x = part(x)
            measured[name] = tuple(x.shape[1:]), counter.get_total_flops() - before
    return measured | {"total": (tuple(x.shape[1:]), counter.get_total_flops())}
