"""`parallel=dp`: `torch.nn.DataParallel`, which replicates the model to the GPUs of one process in every step."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from runner.batching import Plan
from runner.config.errors import check
from runner.device import Device
from runner.parallel.base import Parallel
from runner.parallel.launch.processes import Launcher
from runner.parallel.session import Session
from runner.system.trees import Tree
from runner.tracking.metrics import BatchSums

log = logging.getLogger(__name__)


@dataclass
class DP(Parallel):
    """Data parallelism in one process: each GPU runs a replica of the model on its part of each micro-batch.

    `conf/parallel/dp.yaml` says what custom models have to know. Batch normalization uses the statistics of each GPU's
    part, and keeps the running ones of the first GPU.
    """

    description: ClassVar[str] = "DataParallel"

    def launcher(self, choice: Device) -> Launcher:
        return Launcher(self._devices(choice))

    def divide(self, session: Session) -> Plan:
        why = "replicas would call the compiled network itself, whose weights are on the first GPU"
        check(len(session.devices) == 1 or not session.compile, "compile", session.compile, why, "parallel=ddp")
        is_split = len(session.devices) > 1 and session.workload.has_steps
        check(not is_split, "parallel", "dp", "a replica takes inputs, and steps may call parts of it", "parallel=ddp")
        return session.plan

    def _place(self, model: torch.nn.Module, session: Session) -> torch.nn.Module:
        model, device, devices = super()._place(model, session), session.device, session.devices
        self._replicas = model
        if len(devices) == 1:
            log.warning("parallel=dp: there is one device, %s: nothing is split, this is parallel=single", device)
        elif device.type != "cpu":  # in `runner.planning.fake_step`, it is the CPU, which has no replicas
            if (dtype := session.precision.compute_dtype(device)) is not None:
                # DataParallel enables autocast in its threads, but does not set the dtype: they would use float16.
                model.register_forward_pre_hook(lambda *_: torch.set_autocast_dtype(device.type, dtype))
            self._replicas = torch.nn.DataParallel(model, [each.index for each in devices])
        return model

    def _loss(self, model: torch.nn.Module, batch: Any) -> tuple[torch.Tensor, BatchSums]:
        return super()._loss(self._replicas, batch)

    def _infer(self, model: torch.nn.Module, inputs: Tree) -> Any:
        return super()._infer(self._replicas, inputs)
