"""`parallel=ddp`: `torch.nn.parallel.DistributedDataParallel`."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from runner.batching import MicroBatch, Plan
from runner.config.errors import check
from runner.config.limits import Range
from runner.parallel.batch_norm import convert_sync_batch_norm
from runner.parallel.buffers import named_buffers
from runner.parallel.compiling import refuse_step
from runner.parallel.multiprocess import MultiProcess, Within, finds_unused
from runner.parallel.session import Session
from runner.system import torch_private
from runner.tracking.metrics import BatchSums

log = logging.getLogger(__name__)


@dataclass
class DDP(MultiProcess):
    """Data parallelism: every process holds a replica of the model, and trains it on its shard of each batch.

    Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training (2020). Gradients are averaged
    over the processes once per step, during the backward pass of the last micro-batch. Without `sync_batch_norm`,
    running variances, which are averaged before an evaluation or a checkpoint, are slightly too small, because the
    means of the shards differ from one another. `conf/parallel/ddp.yaml` explains the options.
    """

    description: ClassVar[str] = "DistributedDataParallel"

    bucket_mb: Annotated[float, Range(above=0, most=10_000)] = 25.0
    static_graph: bool = False
    gradients_as_views: bool = True
    find_unused: bool | Literal["auto"] = "auto"
    compression: Literal["none", "fp16", "bf16", "powersgd"] = "none"
    powersgd_rank: Annotated[int, Range(least=1, most=1024)] = 1
    sync_batch_norm: bool = False

    def divide(self, session: Session) -> Plan:
        refuse_step(session.compile, "the all-reduce of the gradients would be inside the compiled step")
        why = "a static graph allows no micro-batch without an all-reduce, and only a step's last one has one"
        remedy = "choose accumulation=1, or leave parallel.static_graph=false"
        check(session.plan.accumulation == 1 or not self.static_graph, "parallel.static_graph", True, why, remedy)
        return session.plan.sharded(session.rank, session.world_size)

    def _place(self, model: torch.nn.Module, session: Session) -> torch.nn.Module:
        device = session.device
        convert_sync_batch_norm(model, device, _BatchNorm if self.sync_batch_norm else torch.nn.SyncBatchNorm)
        if self.sync_batch_norm and session.plan.accumulation > 1:
            log.warning("batch normalization normalizes each micro-batch by itself; accumulation=1 avoids this")
        if session.compile:
            torch_private.split_compiled_ddp(not self.sync_batch_norm and self.bucket_mb >= 1)
        model = super()._place(model, session)
        session.collectives.broadcast([*model.parameters(), *named_buffers([model]).values()])  # DDP's knows few dtypes
        # One for each phase of a step, which all-reduces the gradients of the parameters that the phase trains.
        self._replicas = dict[str, torch.nn.parallel.DistributedDataParallel]()
        for phase in session.workload.phases(model):
            with self.phase(model, phase):
                self._replicas[phase.name] = self._replica(model)
        return model

    def _replica(self, model: torch.nn.Module) -> torch.nn.parallel.DistributedDataParallel:
        replica = torch.nn.parallel.DistributedDataParallel(
            Within(model),
            bucket_cap_mb=self.bucket_mb,
            find_unused_parameters=finds_unused(self.find_unused, model) and not self.static_graph,
            gradient_as_bucket_view=self.gradients_as_views,
            static_graph=self.static_graph,
            init_sync=False,
        )
        replica.broadcast_buffers = False  # the argument has another name since torch 2.14
        if self.compression != "none":
            replica.register_comm_hook(*self._hook())
        return replica

    def _hook(self) -> tuple[Any, Any]:
        if self.compression == "powersgd":
            from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd

            # The first two steps are not compressed: torch's minimum with error feedback.
            return powersgd.PowerSGDState(None, self.powersgd_rank, start_powerSGD_iter=2), powersgd.powerSGD_hook
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        return None, getattr(default_hooks, f"{self.compression}_compress_hook")

    def accumulate(self, model: torch.nn.Module, batch: Any, micro: MicroBatch, log_due: bool) -> BatchSums | None:
        # DDP averages over the processes, but the weights of their micro-batches already add up to one.
        micro = micro._replace(weight=micro.weight * self._session.world_size)
        with nullcontext() if micro.is_last else self._replicas[self._session.workload.phase].no_sync():
            return super().accumulate(model, batch, micro, log_due)

    def _loss(self, model: torch.nn.Module, batch: Any) -> tuple[torch.Tensor, BatchSums]:
        return self._replicas[self._session.workload.phase](super()._loss, batch)
