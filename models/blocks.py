"""The blocks of a network, between which a pipeline can split it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # config errors are reported before torch is imported, and options import this file
    from torch import nn


def blocks_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return what the method `blocks()` of `model` returns, without one those of a `Sequential`, otherwise nothing.

    A submodule named `blocks`, which many networks have, does not count.
    """
    from torch import nn

    if (blocks := getattr(type(model), "blocks", None)) is not None:
        return blocks(model)
    return list(model.named_children()) if type(model).forward is nn.Sequential.forward else []


def block_indices(model: nn.Module) -> dict[str, int]:
    """Return the index of the block of each parameter by name; 0 for one of no block, and {} without blocks."""
    blocks = blocks_of(model)
    index_of = {id(parameter): i for i, (_, block) in enumerate(blocks) for parameter in block.parameters()}
    return {name: index_of.get(id(p), 0) for name, p in model.named_parameters()} if blocks else {}
