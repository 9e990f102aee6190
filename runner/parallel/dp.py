"""One process, several GPUs: `torch.nn.DataParallel`, which replicates the model at every step."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from runner.batching import MicroBatch
from runner.device import Device
from runner.parallel.base import Parallel
from runner.parallel.devices import check_not_hidden, first, spread
from runner.precision import Precision
from runner.workloads.base import Workload

if TYPE_CHECKING:
    from runner.run import Run

log = logging.getLogger(__name__)


@dataclass
class DP(Parallel):
    """Each micro-batch is cut over `device.indices`, each GPU computes with a copy of the model, outputs are gathered.

    torch's documentation advises ddp instead. What to know where a model is one's own: each copy lives for one forward
    pass, so that what `forward` writes to the module is lost, but for the first GPU's buffers; hooks on modules fire
    once a GPU, and must be safe in threads; `pad_packed_sequence` needs `total_length`, or the GPUs' outputs differ in
    length. Batch normalisation sees each GPU's part alone, and keeps the statistics of the first.
    """

    def device(self, choice: Device) -> torch.device:
        check_not_hidden(choice)
        device = first(choice)
        self._devices = spread(choice, device)
        return device

    def place(self, model: torch.nn.Module, device: torch.device, run: Run) -> torch.nn.Module:
        model = super().place(model, device, run)
        self._replicas = model
        if len(self._devices) > 1:
            if (dtype := run.precision.compute_dtype(device)) is not None:
                # autocast is passed on to the GPUs' threads, but not its format: each would compute in float16.
                model.register_forward_pre_hook(lambda *_: torch.set_autocast_dtype(device.type, dtype))
            self._replicas = torch.nn.DataParallel(model, [device.index for device in self._devices])
        else:
            log.warning("parallel=dp: there is one device, %s: nothing is split, this is parallel=single", device)
        return model

    def accumulate(
        self, model: torch.nn.Module, workload: Workload, batch: Any, precision: Precision, micro: MicroBatch
    ) -> torch.Tensor:
        return super().accumulate(self._replicas, workload, batch, precision, micro)

    def infer(self, model: torch.nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        return self._replicas(inputs)
