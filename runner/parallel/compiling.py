"""`compile`: torch.compile for the network as a whole, or for each of its blocks.

https://docs.pytorch.org/tutorials/recipes/regional_compilation.html
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, TypeVar

import torch

from runner.config.errors import check
from runner.models.blocks import blocks_of

T = TypeVar("T")

# The compiler imports this module, which warns of a CUDA toolkit without a GPU, also where it compiles for a CPU.
logging.getLogger("torch.utils.cpp_extension").addFilter(lambda record: "No CUDA runtime" not in str(record.msg))

_VARIANTS = 8
"""How many times one block may be compiled: for training and evaluation, and for batches of another size."""


def modules_of_blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the blocks of `model` that have parameters and are submodules of it.

    Blocks that `model.blocks()` has made from several submodules, such as the stem of a ResNet, are left out.
    """
    submodules = {id(module) for module in model.modules()}
    found = dict.fromkeys(block for _, block in blocks_of(model))  # one that is used twice, once
    return [block for block in found if id(block) in submodules and any(True for _ in block.parameters())]


def compile_in_place(module: torch.nn.Module, how: bool | str, blocks: Sequence[torch.nn.Module] | None = None) -> None:
    """Compile `module`, a network or a stage of it, without changing the names of its parameters.

    `how` is the option `compile`. `blocks` are those of `module`, by default what `modules_of_blocks` returns; if there
    are none to compile, a `ConfigError` is raised.
    """
    if how == "blocks":
        found = modules_of_blocks(module) if blocks is None else blocks
        why = f"{type(module).__name__}: it has no blocks() that could be compiled one by one"
        check(bool(found), "compile", how, why, "compile=true")
        from torch.compiler import config

        # Blocks of the same class share one function, which is compiled again for each new set of shapes.
        count = _VARIANTS * len(found)
        config.recompile_limit = max(config.recompile_limit, count)
        config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, count)
        for block in found:
            block.compile()
    elif how is True:  # `step` compiles more than the network: see `runner.compiled_step`
        module.compile()


def refuse_step(how: bool | str, why: str) -> None:
    """Raise a `ConfigError` if `how` is `step`, which a parallel mode cannot compile because `why`."""
    check(how != "step", "compile", "step", why, "compile=true, or parallel=single, ensemble or hogwild")


def compile_whole(function: Callable[..., T], device: torch.device) -> Callable[..., T]:
    """Return `function`, compiled as one graph for each shape of its arguments, for calls without autograd.

    Of what it reads, only the values of tensors may change after the first call, and on CUDA, where the graph is
    recorded, only those of its arguments and of tensors marked by `torch_private.mark_static`. This is not checked
    before each call, as it would take a fifth of the time of a small network's step. On CUDA, the next call overwrites
    what this one returns. Random numbers are those that torch draws without a compiler.
    """
    options: dict[str, Any] = {"fallback_random": True, "guard_filter_fn": torch.compiler.keep_tensor_guards_unsafe}
    options["cpp_wrapper"] = device.type == "cpu"  # kernels are called from C++: two thirds of the time from Python
    options["triton.cudagraphs"] = device.type == "cuda"
    if torch.__version__ < "2.14":  # fails for the updates of several parameters; 2.14 was found to be right
        options["loop_ordering_after_fusion"] = False

    def whole(*arguments: Any) -> T:
        return function(*arguments)

    # Of its own code: functions of the same code would share what is compiled, although it is that of other objects.
    separate = FunctionType(whole.__code__.replace(), whole.__globals__, closure=whole.__closure__)
    compiled = torch.compile(separate, fullgraph=True, dynamic=False, options=options)

    @torch.no_grad()
    def call(*arguments: Any) -> T:
        if device.type == "cuda":
            torch.compiler.cudagraph_mark_step_begin()
        return compiled(*arguments)

    return call
