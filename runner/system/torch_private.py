"""Functions that access torch's private state, which a new version may break; each says why (see also fake_tensors).

No torch issue about a public function is known unless it is named.
"""

from __future__ import annotations

from typing import Any

import torch

from runner.system.lazy_import import defer


def num_operations() -> int:
    """Return the number of gloo operations that this process has started, over all groups, also those of DDP in C++.

    torch has no public counter, and no timeout that excludes the time during which processes are suspended.
    """
    from torch.distributed import distributed_c10d

    cpu, groups = torch.device("cpu"), list(distributed_c10d._world.pg_map)
    backends: list[Any] = [group._get_backend(cpu) for group in groups]
    return sum(backend._get_sequence_number_for_group() for backend in backends)


def abort_process_group() -> None:
    """Abort all process groups, in which other ranks may still be waiting.

    The public `destroy_process_group` ends NCCL's communicators in agreement with the other ranks, which may not come.
    """
    from torch.distributed import distributed_c10d

    distributed_c10d._abort_process_group()


def defer_compiler() -> None:
    """Defer loading `torch._dynamo`, the front end of the compiler, until a function is compiled.

    All optimizers of torch import it, in order to call two functions that do nothing unless a function is being
    compiled. The import takes about a second before the first step of every run.
    """
    disabled: list[Any] = []

    def disable(fn: Any, recursive: bool = True, **options: Any) -> Any:
        disabled.append(fn)
        return fn

    def forget_disabled() -> None:
        for fn in disabled:  # functions decorated with `torch._disable_dynamo`, which keep the result of `disable`
            vars(fn).pop("__dynamo_disable", None)

    defer("torch._dynamo", {"graph_break": lambda *_: None, "disable": disable}, forget_disabled)


def is_batched(tensor: torch.Tensor) -> bool:
    """Return whether `torch.func.vmap` computes with `tensor`, whose `requires_grad` is then that of no real tensor."""
    return torch._C._functorch.is_batchedtensor(tensor)  # pyright: ignore[reportAttributeAccessIssue]


def mark_static(tensor: torch.Tensor) -> None:
    """Tell the compiler that `tensor` will not move, so that a recorded CUDA graph may read and write its memory."""
    import torch._dynamo

    torch._dynamo.mark_static_address(tensor)


def split_compiled_ddp(split: bool) -> None:
    """Set for this process whether the compiler splits a network in DDP, to send gradients during the backward pass.

    Splitting fails with buckets of less than 1 MiB, or if the network contains an autograd function, as synchronized
    batch normalization does (`DDPOptimizer` in torch/_dynamo/backends/distributed.py).
    https://github.com/pytorch/pytorch/issues/137481
    """
    import torch._dynamo

    config: Any = torch._dynamo.config
    config.optimize_ddp = split


def found_inf_flags(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the overflow flags that `GradScaler.unscale_` has set: one float32 scalar, 0 or 1, for each device.

    `GradScaler.step` and `GradScaler.update` read these tensors. If each rank holds the gradients of only a part of
    the model, the flags have to be reduced over the ranks before `step`, so that all ranks skip the same updates
    (https://github.com/pytorch/pytorch/issues/67590, if it gave access to the flags before `step`).
    """
    return list(scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values())
