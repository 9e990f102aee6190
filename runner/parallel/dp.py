"""`parallel=dp`: `torch.nn.DataParallel`, which replicates the model over the GPUs of one process at every step."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from runner.batching import MicroBatch
from runner.device import Device
from runner.parallel.base import Parallel
from runner.parallel.context import Context
from runner.parallel.devices import devices_of_one_process
from runner.parallel.launch.launcher import Launcher

log = logging.getLogger(__name__)


@dataclass
class DP(Parallel):
    """Each micro-batch is scattered over `device.indices`, each GPU computes with a replica, the outputs are gathered.

    torch's documentation recommends ddp instead. What to know with a model of one's own: each replica lives for one
    forward pass, so that what `forward` writes to the module is lost, but for the buffers on the first GPU; hooks on
    modules run once per GPU, and must be thread-safe; `pad_packed_sequence` needs `total_length`, or the outputs differ
    in length. Batch normalisation sees each GPU's part alone, and keeps the running statistics of the first.
    """

    description: ClassVar[str] = "DataParallel"

    def launcher(self, choice: Device) -> Launcher:
        self._check_one_process()
        return Launcher(devices_of_one_process(choice))

    def _place(self, model: torch.nn.Module, context: Context) -> torch.nn.Module:
        model, device, devices = super()._place(model, context), context.device, context.process.devices
        self._replicas = model
        if len(devices) > 1:
            if (dtype := context.precision.compute_dtype(device)) is not None:
                # DataParallel enables autocast in the GPUs' threads, but not its dtype: each would compute in float16.
                model.register_forward_pre_hook(lambda *_: torch.set_autocast_dtype(device.type, dtype))
            self._replicas = torch.nn.DataParallel(model, [each.index for each in devices])
        else:
            log.warning("parallel=dp: there is one device, %s: nothing is split, this is parallel=single", device)
        return model

    def accumulate(self, model: torch.nn.Module, batch: Any, micro: MicroBatch, log_due: bool) -> torch.Tensor:
        return self._accumulate(self._replicas, batch, micro.weight)

    def infer(self, model: torch.nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        return self._replicas(inputs)
