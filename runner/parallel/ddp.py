"""`parallel=ddp`: `torch.nn.parallel.DistributedDataParallel`."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from runner.batching import MicroBatch
from runner.config.errors import check, check_choice, check_range
from runner.parallel.context import Context, Layout
from runner.parallel.full_state import TensorDict
from runner.parallel.launch.cluster import RankInfo
from runner.parallel.multiprocess import MultiProcess, average_buffers
from runner.tracking.metrics import MetricSums


@dataclass
class DDP(MultiProcess):
    """Every process holds a replica of the model and trains on its shard of each batch; gradients are averaged.

    Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training (2020). Gradients are all-reduced
    once a step, during the backward pass of the last micro-batch. Batch normalisation sees the process's shard alone,
    unless `sync_batch_norm`; its running statistics are averaged over the processes before they are used. The averaged
    mean is that of the whole batch; the averaged variance lacks the variance between the shards' means.

    Args:
        bucket_mb: gradients are all-reduced in buckets of this many MiB, each while the backward pass goes on.
        static_graph: the same parameters are used in every step, so that torch can plan ahead.
        gradients_as_views: gradients are views of the buckets, which saves a copy of them in memory.
        find_unused: search for parameters that a step does not use; slower, and needed only where there are some.
        compression: of the gradients while they are sent: `none`; `fp16` and `bf16` halve the bytes and round;
            `powersgd` sends low-rank factors (Vogels et al., 2019), whose error feedback starts anew on a resume.
        powersgd_rank: of those factors.
        sync_batch_norm: batch normalisation over the shards of all processes.
    """

    description: ClassVar[str] = "DistributedDataParallel"

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

    def layout(self, rank_info: RankInfo) -> Layout:
        return Layout.data_parallel(rank_info)

    def check(self, context: Context) -> None:
        alone = not self.static_graph or context.plan.accumulation == 1
        why = "torch cannot plan ahead for steps whose first micro-batches send nothing"
        remedy = "choose accumulation=1, or leave parallel.static_graph=false"
        check(alone, "parallel.static_graph", True, why, remedy)

    def _place(self, model: torch.nn.Module, context: Context) -> torch.nn.Module:
        device = context.device
        if self.sync_batch_norm:
            from runner.parallel.sync_batch_norm import convert_sync_batch_norm

            model = convert_sync_batch_norm(model, device)
        model = super()._place(model, context)
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
        """The state and the function of torch's communication hook."""
        if self.compression == "powersgd":
            from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd

            # Two steps uncompressed: the least that its memory of the error allows.
            return powersgd.PowerSGDState(None, self.powersgd_rank, start_powerSGD_iter=2), powersgd.powerSGD_hook
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        return None, getattr(default_hooks, f"{self.compression}_compress_hook")

    def accumulate(self, model: torch.nn.Module, batch: Any, micro: MicroBatch, log_due: bool) -> torch.Tensor:
        # DDP averages over the processes; the weights of all micro-batches add up to one over all of them.
        weight = micro.weight * self._context.world_size
        with nullcontext() if micro.is_last else self._replica.no_sync():
            return self._accumulate(self._replica, batch, weight)

    def evaluate(self, model: torch.nn.Module) -> tuple[dict[str, float], MetricSums]:
        average_buffers(model, self._context.collectives)
        return super().evaluate(model)

    def full_state(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[TensorDict, dict[str, Any]]:
        average_buffers(model, self._context.collectives)
        return super().full_state(model, optimizer)


def _without_buffers() -> dict[str, Any]:
    """DDP's option not to broadcast buffers, which are averaged before they are used; renamed in torch 2.14."""
    options = inspect.signature(torch.nn.parallel.DistributedDataParallel).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in options else "broadcast_buffers": False}
