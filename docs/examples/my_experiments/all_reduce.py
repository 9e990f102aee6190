"""A parallel mode: data parallel training with one all-reduce per gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from runner.batching import MicroBatch, Plan
from runner.parallel.multiprocess import MultiProcess
from runner.parallel.session import Session
from runner.tracking.metrics import BatchSums


@dataclass
class AllReduce(MultiProcess):
    """Every process holds a replica and trains on its shard of each batch; gradients are summed over the processes."""

    description: ClassVar[str] = "one all-reduce per gradient"  # in the first lines of a run

    def divide(self, session: Session) -> Plan:
        return session.plan.sharded(session.rank, session.world_size)

    def accumulate(self, model: torch.nn.Module, batch: Any, micro: MicroBatch, log_due: bool) -> BatchSums:
        sums = super().accumulate(model, batch, micro, log_due)
        if micro.is_last:
            # micro.weight is a share of the global batch, so the sum over the processes is the gradient of its mean.
            for parameter in model.parameters():
                if parameter.grad is not None:
                    torch.distributed.all_reduce(parameter.grad)
        return sums
