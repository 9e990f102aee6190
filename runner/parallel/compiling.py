"""`compile`: torch.compile for the network as a whole, or for each of its blocks.

https://docs.pytorch.org/tutorials/recipes/regional_compilation.html
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from models.blocks import blocks_of
from runner.config.errors import ConfigError

_VARIANTS = 8
"""How many times one block may be compiled: for training and evaluation, and for batches of another size."""


def modules_of_blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the blocks of `model` that have parameters and are submodules of it.

    Blocks that `model.blocks()` has made from several submodules, such as the stem of a ResNet, are left out.
    """
    submodules = {id(module) for module in model.modules()}
    found = [block for _, block in blocks_of(model)]
    return [block for block in found if id(block) in submodules and any(True for _ in block.parameters())]


def compile_in_place(module: torch.nn.Module, how: bool | str, blocks: Sequence[torch.nn.Module] | None = None) -> None:
    """Compile `module`, a network or a stage of it, without changing the names of its parameters.

    `how` is the option `compile`. `blocks` are those of `module`, by default what `modules_of_blocks` returns; if there
    are none to compile, a `ConfigError` is raised.
    """
    if how == "blocks":
        found = modules_of_blocks(module) if blocks is None else blocks
        if not found:
            why = f"{type(module).__name__}: it has no blocks() that could be compiled one by one"
            raise ConfigError("compile", how, why, "compile=true")
        from torch.compiler import config

        # Blocks of the same class share one function, which is compiled again for each new set of shapes.
        count = _VARIANTS * len(found)
        config.recompile_limit = max(config.recompile_limit, count)
        config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, count)
        for block in found:
            block.compile()
    elif how:
        module.compile()
