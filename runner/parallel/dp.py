"""`parallel=dp`: `torch.nn.DataParallel`, which replicates the model to the GPUs of one process in every step."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from runner.batching import MicroBatch
from runner.config.errors import check
from runner.device import Device
from runner.parallel.base import Parallel, devices_of_one_process
from runner.parallel.launch.launcher import Launcher
from runner.session import Session
from runner.tracking.metrics import BatchSums

log = logging.getLogger(__name__)


@dataclass
class DP(Parallel):
    """Data parallelism in one process: each GPU runs a replica of the model on its part of each micro-batch.

    torch's documentation recommends ddp instead. Three notes for custom models: (1) A replica exists for only one
    forward pass, so whatever `forward` writes to the module is lost, except for buffers on the first GPU. (2) Module
    hooks run once per GPU, and must be thread-safe. (3) `pad_packed_sequence` needs the argument `total_length`;
    otherwise, the outputs of the GPUs may differ in length.

    Batch normalization uses the statistics of each GPU's part; only the running statistics of the first GPU are kept.
    """

    description: ClassVar[str] = "DataParallel"

    def launcher(self, choice: Device) -> Launcher:
        self._check_one_process()
        return Launcher(devices_of_one_process(choice))

    def check(self, session: Session) -> None:
        why = "replicas would call the compiled network itself, whose weights are on the first GPU"
        check(not session.compile or len(session.devices) == 1, "compile", session.compile, why, "parallel=ddp")

    def _place(self, model: torch.nn.Module, session: Session) -> torch.nn.Module:
        model, device, devices = super()._place(model, session), session.device, session.devices
        self._replicas = model
        if len(devices) == 1:
            log.warning("parallel=dp: there is one device, %s: nothing is split, this is parallel=single", device)
        elif device.type == "cuda":  # in `runner.planning.fake_step`, it is the CPU, which has no replicas
            if (dtype := session.precision.compute_dtype(device)) is not None:
                # DataParallel enables autocast in its threads, but does not set the dtype: they would use float16.
                model.register_forward_pre_hook(lambda *_: torch.set_autocast_dtype(device.type, dtype))
            self._replicas = torch.nn.DataParallel(model, [each.index for each in devices])
        return model

    def accumulate(self, model: torch.nn.Module, batch: Any, micro: MicroBatch, log_due: bool) -> BatchSums:
        return self._accumulate(self._replicas, batch, micro.weight)

    def _infer(self, model: torch.nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        return self._replicas(inputs)
