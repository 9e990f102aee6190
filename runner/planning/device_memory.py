"""The memory that the devices of a run have, and the memory that the run needs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from runner.parallel.collectives import Collectives
from runner.planning.fake_step import RankPlan
from runner.system.memory import host_memory

_PROCESS_BYTES = 0.4e9
"""Bytes that a process takes in addition to its tensors."""

_USABLE = 0.95
"""The fraction of a GPU's memory that the CUDA context and fragmentation leave for tensors."""


def available_bytes(process: Collectives) -> float:
    """Return the memory in bytes that all processes of a run together may use.

    With CUDA, this is a fixed fraction of the total memory of the run's GPUs, even if some of this memory is in use at
    the moment. Otherwise, it is the host memory that is available at the moment.

    Args:
        process: any process of the run.
    """
    device = process.devices[0]
    if device.type == "cuda":  # not `mem_get_info`, whose context would itself take memory
        count = max(process.world_size, len(process.devices))
        return _USABLE * torch.cuda.get_device_properties(device).total_memory * count
    return host_memory()["available_bytes"] or 0


def needed_bytes(device: torch.device, ranks: Sequence[RankPlan]) -> float:
    """Return the predicted memory in bytes of all processes of a run together.

    The result is compared with `available_bytes`. With CUDA, the result is the largest peak of any rank times
    the number of ranks: as each rank has its own GPUs, one rank cannot use the free memory of another. Otherwise, it is
    the sum of the peaks of all ranks, plus what each process takes besides tensors.

    Args:
        device: the device of any rank; only its type matters.
        ranks: the plan of each rank of the run.
    """
    peaks = [rank.peak_bytes for rank in ranks]
    if device.type == "cuda":
        return max(peaks) * len(ranks)
    return sum(peaks) + _PROCESS_BYTES * len(ranks)
