"""Replicas in several processes, whose gradients are averaged: `torch.nn.parallel.DistributedDataParallel`."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from runner.batching import MicroBatch
from runner.config import check, check_choice, check_range
from runner.parallel.processes import Processes
from runner.precision import Precision
from runner.workloads.base import Sums, Workload

if TYPE_CHECKING:
    from runner.run import Run


@dataclass
class DDP(Processes):
    """Every process holds the whole model and trains on its part of each batch; gradients are averaged as they come.

    Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training (2020). Gradients are sent once a
    step, with the last micro-batch. Batch normalisation sees each process's part alone, unless `sync_batch_norm`; its
    running statistics are averaged over the processes where they are read. Their means are then those of one process
    with the whole batch, their variances lack what the parts' means differ by.

    Args:
        bucket_mb: gradients are sent in buckets of this many MiB, each while the backward pass goes on.
        static_graph: the same parameters get gradients in every step: lets torch plan ahead.
        gradients_as_views: gradients live in the buckets: saves their memory a second time.
        find_unused: look for parameters that a step does not use; slower, and needed only where there are some.
        compression: how gradients are sent: `none`; `fp16` and `bf16` halve the bytes and round; `powersgd` sends
            low-rank factors (Vogels et al., 2019), whose memory of the error a resume begins anew.
        powersgd_rank: of those factors.
        sync_batch_norm: batch normalisation over all processes' parts of a micro-batch.
    """

    bucket_mb: float = 25.0
    static_graph: bool = False
    gradients_as_views: bool = True
    find_unused: bool = False
    compression: str = "none"
    powersgd_rank: int = 1
    sync_batch_norm: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "bucket_mb", above=0, most=10_000)
        check_range(self, "powersgd_rank", least=1, most=1024)
        check_choice(self, "compression", ("none", "fp16", "bf16", "powersgd"))

    def prepare(self, device: torch.device, run: Run) -> None:
        alone = not self.static_graph or run.accumulation.steps == 1
        why = "torch cannot plan ahead for steps whose first micro-batches send nothing"
        check(alone, "static_graph", True, why, "choose accumulation=1, or leave parallel.static_graph=false")
        super().prepare(device, run)

    def place(self, model: torch.nn.Module, device: torch.device, run: Run) -> torch.nn.Module:
        if self.sync_batch_norm:
            from runner.parallel.batch_norm import with_shared_batch_norm

            model = with_shared_batch_norm(model, device)
        model = super().place(model, device, run)
        replica = torch.nn.parallel.DistributedDataParallel(
            model,
            device_ids=[device.index] if device.type == "cuda" else None,
            bucket_cap_mb=self.bucket_mb,  # pyright: ignore[reportArgumentType]  # torch says int, and takes any
            find_unused_parameters=self.find_unused,
            gradient_as_bucket_view=self.gradients_as_views,
            static_graph=self.static_graph,
            **_without_buffers(),
        )
        if self.compression != "none":
            state, hook = self._hook()
            replica.register_comm_hook(state, hook)
        self._replica = replica
        return model

    def _hook(self) -> tuple[Any, Any]:
        """What sends a bucket of gradients, and its state."""
        if self.compression == "powersgd":
            from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd

            # Two steps uncompressed: the least that its memory of the error allows.
            return powersgd.PowerSGDState(None, self.powersgd_rank, start_powerSGD_iter=2), powersgd.powerSGD_hook
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        return None, getattr(default_hooks, f"{self.compression}_compress_hook")

    def accumulate(
        self, model: torch.nn.Module, workload: Workload, batch: Any, precision: Precision, micro: MicroBatch
    ) -> torch.Tensor:
        # DDP averages over the processes; the weights of all micro-batches add up to one over all of them.
        summed = micro._replace(weight=micro.weight * self.world_size)
        with nullcontext() if micro.is_last else self._replica.no_sync():
            return super().accumulate(self._replica, workload, batch, precision, summed)

    def evaluate(
        self, model: torch.nn.Module, workload: Workload, precision: Precision, device: torch.device
    ) -> tuple[dict[str, float], Sums]:
        self.average_buffers(model)
        return super().evaluate(model, workload, precision, device)

    def full_state(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Sums, dict[str, Any]]:
        self.average_buffers(model)
        return super().full_state(model, optimizer)


def _without_buffers() -> dict[str, Any]:
    """DDP's option to leave buffers alone: they are averaged where they are read. torch 2.14 has a new name for it."""
    options = inspect.signature(torch.nn.parallel.DistributedDataParallel).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in options else "broadcast_buffers": False}
