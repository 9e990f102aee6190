"""The blocks of a network: the modules that its method `blocks()` returns, in forward order.

A pipeline can split the network into stages between any two blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # config errors are reported before torch is imported, and options import this file
    from torch import nn


def blocks_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return what the method `blocks()` of `model` returns; an empty list if it has no such method.

    A submodule named `blocks`, which many networks have, does not count.
    """
    blocks = getattr(type(model), "blocks", None)
    return [] if blocks is None else blocks(model)


def block_indices(model: nn.Module) -> dict[str, int]:
    """Return a dict from the name of each parameter to the index of the block that holds the parameter.

    A parameter that is part of no block belongs to the first block. If the network lists no blocks, the dict is empty.
    """
    blocks = blocks_of(model)
    index_of = {id(parameter): i for i, (_, block) in enumerate(blocks) for parameter in block.parameters()}
    return {name: index_of.get(id(p), 0) for name, p in model.named_parameters()} if blocks else {}
