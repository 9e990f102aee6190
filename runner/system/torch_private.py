"""Access to torch's private state, in a single file, so that a new version of torch breaks only one place.

Each function says why it is needed, and which torch issue would make it unnecessary.
"""

from __future__ import annotations

from typing import Any

import torch


def num_operations() -> int:
    """Return how many gloo operations this process has begun, in all of its process groups.

    The count includes collectives, point-to-point operations, and the operations that DDP begins in C++. A public count
    would make this function unnecessary, and so would a timeout that does not count time in which the processes are
    suspended; no torch issue known.
    """
    from torch.distributed import distributed_c10d

    cpu, groups = torch.device("cpu"), list(distributed_c10d._world.pg_map)
    backends: list[Any] = [group._get_backend(cpu) for group in groups]
    return sum(backend._get_sequence_number_for_group() for backend in backends)


def found_inf_flags(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the overflow flags that `GradScaler.unscale_` has set: one float32 scalar, 0 or 1, for each device.

    `GradScaler.step` and `GradScaler.update` read these tensors. If ranks hold different gradients of one model, the
    flags have to be reduced over the ranks before `step`, so that all ranks skip the same updates. A public way to
    learn whether an update was skipped is requested in https://github.com/pytorch/pytorch/issues/67590; to be of use
    here, it would have to give access to the flags before `step`.
    """
    return list(scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values())
