"""`parallel=model`: the stages of the network run on several devices of one process, one stage at a time."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from runner.batching import MicroBatch, Plan
from runner.config.errors import check
from runner.device import Device
from runner.parallel.base import Parallel, move
from runner.parallel.compiling import compile_in_place, refuse_step
from runner.parallel.launch.processes import Launcher
from runner.parallel.pipelining.partition import Partition, first_inputs, supervised
from runner.parallel.pipelining.stages import Blocks
from runner.parallel.session import Session
from runner.system.trees import Tree, call, map_tensors
from runner.tracking.metrics import BatchSums

log = logging.getLogger(__name__)


@dataclass
class ModelParallel(Partition, Parallel):
    """Model parallelism: the network is split into stages on several devices, and one device computes at a time.

    This mode is for networks too large for one GPU. With `parallel=pipeline`, all devices compute at the same time.
    """

    description: ClassVar[str] = "model split over devices"

    def launcher(self, choice: Device) -> Launcher:
        devices = self._devices(choice)
        stages = self.asked_stages or len(devices)
        why = f"there are {len(devices)} GPUs, and each stage has its own"
        check(not 1 < len(devices) < stages, "parallel.stages", stages, why, f"at most parallel.stages={len(devices)}")
        return Launcher(devices[:stages])

    def divide(self, session: Session) -> Plan:
        refuse_step(session.compile, "the stages are on different devices")
        supervised(session.workload)
        return session.plan

    def check(self, session: Session) -> None:
        if self.asked_stages is not None or len(session.devices) > 1:
            self.check_partition(session.workload, self.asked_stages or len(session.devices))

    def _place(self, model: torch.nn.Module, session: Session) -> torch.nn.Module:
        devices, device = session.devices, session.device
        if len(devices) == 1:
            log.warning("parallel=model: there is one device, %s: nothing is split, this is parallel=single", device)
            self._stages: list[torch.nn.Module] = [super()._place(model, session)]
            return model
        _, starts = self.profiled(model, first_inputs(model, session), session, len(devices))
        stages = [Blocks(blocks) for blocks in self.cut(model, starts, session)]
        move(model, device, session.channels_last)
        for stage, place in zip(stages, devices, strict=True):
            stage.to(place)
            compile_in_place(stage, session.compile, list(stage.blocks))
        session.precision.convert(stages[0])  # the inputs are passed to the first stage, not to the whole network
        self._stages = list(stages)
        return model

    def _forward(self, *inputs: Any, **options: Any) -> torch.Tensor:
        first, *others = self._stages
        x = first(*inputs, **options)
        for stage, device in zip(others, self._session.devices[1:], strict=True):
            x = stage(x.to(device, non_blocking=True))
        return x

    def accumulate(self, model: torch.nn.Module, batch: Any, micro: MicroBatch, log_due: bool) -> BatchSums | None:
        last = self._session.devices[-1]
        moved = batch._replace(targets=map_tensors(lambda each: each.to(last, non_blocking=True), batch.targets))
        stages: Any = self._forward
        if (loss := self._session.workload.loss_module()) is not None:
            loss.to(last)
        sums = super().accumulate(stages, moved, micro, log_due)
        return None if sums is None else sums.to(self._session.device, non_blocking=True)

    def _infer(self, model: torch.nn.Module, inputs: Tree) -> torch.Tensor:
        return call(self._forward, inputs).to(self._session.device)
