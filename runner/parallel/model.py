"""Consecutive pieces of the network on consecutive devices of one process, which work one after the other."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import torch

from runner.batching import MicroBatch
from runner.config import check
from runner.device import Device
from runner.parallel.base import Parallel, move
from runner.parallel.cuts import Cuts, probed, stages_of, told
from runner.parallel.devices import check_not_hidden, first, spread
from runner.precision import Precision
from runner.workloads.base import Workload

if TYPE_CHECKING:
    from runner.run import Run

log = logging.getLogger(__name__)


@dataclass
class ModelParallel(Cuts, Parallel):
    """A network too large for one GPU: activations move from device to device, and one device works at a time.

    Labels meet the outputs on the last device. `parallel=pipeline` has all devices work at the same time.
    """

    def device(self, choice: Device) -> torch.device:
        check_not_hidden(choice)
        self._devices = spread(choice, first(choice))
        return self._devices[0]

    def prepare(self, device: torch.device, run: Run) -> None:
        Parallel.prepare(self, device, run)
        devices, stages = len(self._devices), self.stages or len(self._devices)
        why = f"there are {devices} GPUs, and each piece has its own"
        check(devices == 1 or stages <= devices, "stages", stages, why, f"at most parallel.stages={devices}")
        self._devices = self._devices[:stages]

    def check_workload(self, run: Run) -> None:
        super().check_workload(run)
        if self.cuts != "auto" or self.stages is not None or len(self._devices) > 1:
            self.check_cuts(run, self.stages or len(self._devices))

    def place(self, model: torch.nn.Module, device: torch.device, run: Run) -> torch.nn.Module:
        if len(self._devices) == 1:
            log.warning("parallel=model: there is one device, %s: nothing is split, this is parallel=single", device)
            self._chain: Any = model
            return super().place(model, device, run)
        with closing(cast(Any, run.workload.batches(model, run.plan, 0, device))) as batches:
            inputs = next(batches)[0]
        seen = inputs.to(next(model.parameters()).dtype) if inputs.is_floating_point() else inputs
        blocks = probed(stages_of(model), seen, run.precision.autocast, run.channels_last, self.cuts == "auto")
        cuts = self.borders(blocks, len(self._devices))
        log.info("stages: %s", told(blocks, cuts))
        move(model, device, run.channels_last)
        stages = [stage for _, stage in stages_of(model)]
        pieces = [torch.nn.Sequential(*stages[start:stop]) for start, stop in pairwise(cuts)]
        for piece, its_own in zip(pieces, self._devices, strict=True):
            piece.to(its_own)
            if run.compile:
                piece.compile()
        run.precision.convert(pieces[0])  # it takes the inputs, where the whole network did
        self._chain = partial(_through, pieces, self._devices)
        return model

    def accumulate(
        self, model: torch.nn.Module, workload: Workload, batch: Any, precision: Precision, micro: MicroBatch
    ) -> torch.Tensor:
        if len(self._devices) == 1:
            return super().accumulate(model, workload, batch, precision, micro)
        last = batch._replace(targets=batch.targets.to(self._devices[-1], non_blocking=True))
        sums = super().accumulate(self._chain, workload, last, precision, micro)
        return sums.to(self._devices[0], non_blocking=True)

    def infer(self, model: torch.nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        return self._chain(inputs).to(inputs.device)


def _through(pieces: Sequence[torch.nn.Module], devices: list[torch.device], x: torch.Tensor) -> torch.Tensor:
    """The network's outputs, on the last device."""
    for piece, device in zip(pieces, devices, strict=True):
        x = piece(x.to(device, non_blocking=True))
    return x
